"""A write-ahead journal of absolute values: applied once, twice, or half and then again, it gives one result.

File: magic; per tensor its flat indices and new bits; what they are (JSON: the caller's state and, per
tensor, name, count, width of its indices, dtype) and the length of that, 8 bytes; the xxh3-128 of all before.
It appears under its final name only when complete and on disk.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from rollout_bridge.files import whole_file

_MAGIC = b"jaxtrain-journal-2\n"
_LENGTH = struct.Struct("<Q")
HASH_BYTES = 16


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
    with whole_file(path, durable=True) as file:
        _write(file, state, changes)


def _write(file: BinaryIO, state: dict[str, Any], changes: Iterable[Change]) -> None:
    entries = []
    hasher = xxhash.xxh3_128()

    def add(content: bytes | memoryview) -> None:
        hasher.update(content)
        file.write(content)

    add(_MAGIC)
    for change in changes:
        width = 4 if change.indices.size == 0 or int(change.indices[-1]) < 2**32 else 8
        add(np.ascontiguousarray(change.indices, dtype=f"<u{width}").data)
        add(np.ascontiguousarray(change.values).data)
        entries.append([change.name, int(change.indices.size), width, change.values.dtype.str])
    header = json.dumps({"state": state, "entries": entries}).encode()
    add(header)
    add(_LENGTH.pack(len(header)))
    file.write(hasher.digest())


def read(path: Path) -> tuple[dict[str, Any], Iterator[Change]]:
    """(state, changes) of a journal, checked whole before the first change. Raises `JournalError`."""
    data = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
    content, found = data[:-HASH_BYTES], bytes(data[-HASH_BYTES:])
    if xxhash.xxh3_128(content.data).digest() != found:
        raise JournalError(f"{path}: damaged: its checksum does not match its content")
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise JournalError(f"{path}: not a journal of this format")
    (length,) = _LENGTH.unpack(bytes(content[-_LENGTH.size :]))
    header = json.loads(bytes(content[-_LENGTH.size - length : -_LENGTH.size]))
    return header["state"], _changes(content, len(_MAGIC), header["entries"])


def _changes(content: np.ndarray, offset: int, entries: list[Any]) -> Iterator[Change]:
    for name, count, width, dtype in entries:
        middle = offset + count * width
        end = middle + count * np.dtype(dtype).itemsize
        yield Change(name, content[offset:middle].view(f"<u{width}"), content[middle:end].view(dtype))
        offset = end
