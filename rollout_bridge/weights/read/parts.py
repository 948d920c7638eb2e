"""A journal in parts, each written, and later set, by the process that decoded it.

The journal proper lists the parts with their hashes and is what makes them count; a part is a journal of its
own whose state says where in the mirror's file its tensors lie.
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
    """A part at `path`, and the hash that it ends with."""

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
    """`part`, to be set in `file`."""

    part: JournalPart
    file: Path


def set_bits(setting: PartWrite) -> None:
    """Gives the elements their values: once, twice, or half and then again."""
    state, changes = journal.read(setting.part.path)
    data = np.memmap(setting.file, mode="r+", dtype=np.uint8)
    for change in changes:
        begin, end = state["offsets"][change.name]
        np.asarray(data[begin:end]).view(change.values.dtype)[change.indices] = change.values


def remove(directory: Path) -> None:
    """All parts in `directory`, whatever they are of."""
    for path in directory.glob(f"*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(-journal.HASH_BYTES, 2)
        return file.read().hex()
