"""A write-ahead journal of absolute values: applied once, twice, or half and then again, it gives one result.

File: magic, length of header, header (JSON: the caller's state and, per tensor, name, count, width of its
indices, dtype), then per tensor its flat indices and new bits, then the xxh3-128 of all before. It appears
under its final name only when complete and on disk.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

_MAGIC = b"jaxtrain-journal-1\n"
_HASH_BYTES = 16


class JournalError(ValueError):
    """A journal file is damaged; names the file."""


@dataclass(frozen=True)
class Change:
    """Elements of tensor `name` at flat `indices` (ascending) take the bits `values`."""

    name: str
    indices: np.ndarray
    values: np.ndarray


def write(path: Path, state: dict[str, Any], changes: Iterable[Change]) -> None:
    """Writes and syncs the journal; a crash before the end leaves `path` absent, an exception nothing."""
    body, temporary = path.with_suffix(".body"), path.with_suffix(".tmp")
    try:
        _write(body, temporary, state, changes)
    except Exception:
        body.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        raise
    body.unlink()
    os.replace(temporary, path)
    sync_directory(path.parent)


def _write(body: Path, temporary: Path, state: dict[str, Any], changes: Iterable[Change]) -> None:
    entries = []
    with open(body, "wb") as file:
        for change in changes:
            width = 4 if change.indices.size == 0 or int(change.indices[-1]) < 2**32 else 8
            file.write(np.ascontiguousarray(change.indices, dtype=f"<u{width}").data)
            file.write(np.ascontiguousarray(change.values).data)
            entries.append([change.name, int(change.indices.size), width, change.values.dtype.str])
    header = json.dumps({"state": state, "entries": entries}).encode()
    hasher = xxhash.xxh3_128()
    with open(temporary, "wb") as file, open(body, "rb") as content:
        for chunk in (_MAGIC, struct.pack("<Q", len(header)), header):
            hasher.update(chunk)
            file.write(chunk)
        while chunk := content.read(1 << 22):
            hasher.update(chunk)
            file.write(chunk)
        file.write(hasher.digest())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[dict[str, Any], Iterator[Change]]:
    """(state, changes) of a journal, checked whole before the first change. Raises `JournalError`."""
    data = np.memmap(path, mode="r", dtype=np.uint8)
    content, found = data[:-_HASH_BYTES], bytes(data[-_HASH_BYTES:])
    if xxhash.xxh3_128(content.data).digest() != found:
        raise JournalError(f"{path}: damaged: its checksum does not match its content")
    start = len(_MAGIC) + 8
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise JournalError(f"{path}: not a journal of this format")
    (length,) = struct.unpack("<Q", bytes(content[len(_MAGIC) : start]))
    header = json.loads(bytes(content[start : start + length]))
    return header["state"], _changes(content, start + length, header["entries"])


def _changes(content: np.ndarray, offset: int, entries: list[Any]) -> Iterator[Change]:
    for name, count, width, dtype in entries:
        middle = offset + count * width
        end = middle + count * np.dtype(dtype).itemsize
        indices = np.frombuffer(content[offset:middle].tobytes(), f"<u{width}")
        yield Change(name, indices, np.frombuffer(content[middle:end].tobytes(), dtype))
        offset = end


def sync_directory(directory: Path) -> None:
    """Makes renames and removals in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Writes `path` at once or not at all, durably."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)
