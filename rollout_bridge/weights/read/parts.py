"""A journal in parts: a process writes the changes it decoded to a part, and later some process applies it.

The main journal lists the parts with their hashes, and makes them valid. A part is a journal too; its state
holds the offsets of its tensors in the mirror's file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout_bridge.weights.format.chain import TensorChange
from rollout_bridge.weights.read import journal
from rollout_bridge.weights.read.journal import JournalError

SUFFIX = ".part"


@dataclass(frozen=True)
class JournalPart:
    """A part at `path`, and the hash at its end."""

    path: Path
    hash: str


def write(path: Path, offsets: dict[str, tuple[int, int]], changes: Iterable[TensorChange]) -> JournalPart:
    """Writes and syncs a part. offsets: of each tensor in the mirror's file, where it begins and ends."""
    journal.write(path, {"offsets": offsets}, changes)
    return JournalPart(path, _hash(path))


def check(part: JournalPart) -> None:
    """Raises `JournalError` unless the file is the part that was written."""
    if not part.path.exists() or _hash(part.path) != part.hash:
        raise JournalError(f"{part.path}: not the part that its journal names")
    journal.read(part.path)


@dataclass(frozen=True)
class PartWrite:
    """A `part`, and the mirror `file` to write its values to."""

    part: JournalPart
    file: Path


def set_bits(write: PartWrite) -> None:
    """Writes the values. Doing it again, or after a crash half-way, gives the same file."""
    state, changes = journal.read(write.part.path)
    data = np.memmap(write.file, mode="r+", dtype=np.uint8)
    for change in changes:
        begin, end = state["offsets"][change.name]
        np.asarray(data[begin:end]).view(change.values.dtype)[change.indices] = change.values


def remove(directory: Path) -> None:
    """Removes all parts in `directory`."""
    for path in directory.glob(f"*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(-journal.HASH_BYTES, 2)
        return file.read().hex()
