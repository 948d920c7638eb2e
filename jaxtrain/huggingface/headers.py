"""Contents of a Hugging Face directory, from its index and the headers of its safetensors files."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_bridge.safetensors_files import INDEX_FILE, SINGLE_FILE

LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1},
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file. offset: of its first byte in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass
class Headers:
    """Tensors by name, and problems of the files, a line each."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_headers(directory: Path) -> Headers:
    """Reads every header and compares it with the size of its file; reads no tensor."""
    headers = Headers()
    weight_map = _weight_map(directory, headers)
    files = sorted(set(weight_map.values())) if weight_map is not None else [_single(directory, headers)]
    for name in filter(None, files):
        for tensor in _read_file(directory / name, headers):
            if tensor.name in headers.tensors:
                other = headers.tensors[tensor.name].file.name
                headers.problems.append(f"{tensor.name}: is in {other} and in {name}; keep one")
            headers.tensors[tensor.name] = tensor
    readable = {tensor.file.name for tensor in headers.tensors.values()}
    for name, file in sorted((weight_map or {}).items()):
        found = headers.tensors.get(name)
        if file in readable and (found is None or found.file.name != file):
            headers.problems.append(f"{name}: {INDEX_FILE} places it in {file}, where it is not")
    return headers


def _weight_map(directory: Path, headers: Headers) -> dict[str, str] | None:
    path = directory / INDEX_FILE
    if not path.exists() or (directory / SINGLE_FILE).exists():
        return None  # an index beside the one file is of an earlier download; transformers takes the file too
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        wrong = [
            f for f in weight_map.values() if not isinstance(f, str) or os.path.basename(f) != f or not f
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        headers.problems.append(f"{path}: not an index with a weight_map ({error!r}); download it again")
        return {}
    if wrong:
        headers.problems.append(f"{path}: weight_map names {wrong[0]!r}, expected files of this directory")
        return {}
    return weight_map


def _single(directory: Path, headers: Headers) -> str | None:
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if SINGLE_FILE in files:
        return SINGLE_FILE
    if len(files) == 1:
        return files[0]
    pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
    headers.problems.append(
        f"{directory}: found {', '.join(files) if files else 'no *.safetensors file'} and no {INDEX_FILE}; "
        + ("convert the pickled weights to safetensors" if pickled else "download the checkpoint whole")
    )
    return None


def _read_file(path: Path, headers: Headers) -> Iterator[StoredTensor]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(LARGEST_HEADER, size - 8):
                headers.problems.append(
                    f"{path}: truncated or no safetensors file: {size} bytes, its header would have {length}"
                )
                return
            entries = json.loads(file.read(length))
        tensors, end = _entries(path, entries, first=8 + length)
    except FileNotFoundError:
        headers.problems.append(f"{path}: no such file, though {INDEX_FILE} names it; download it")
        return
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        headers.problems.append(f"{path}: its header cannot be read: {error}; download it again")
        return
    if end != size:
        what = "truncated" if size < end else "too long"
        headers.problems.append(
            f"{path}: {what}: {size} bytes, its header describes {end}; download it again"
        )
        tensors = [tensor for tensor in tensors if tensor.offset + tensor.nbytes <= size]
    yield from tensors


def _entries(path: Path, entries: dict[str, Any], *, first: int) -> tuple[list[StoredTensor], int]:
    """Tensors in the order of their bytes, and where the last ends. ValueError if they leave holes."""
    tensors = []
    ordered = sorted(
        ((name, entry) for name, entry in entries.items() if name != "__metadata__"),
        key=lambda item: item[1]["data_offsets"],
    )
    at = first
    for name, entry in ordered:
        dtype, shape = entry["dtype"], entry["shape"]
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{name}: shape {shape!r} is no list of sizes")
        tensor = StoredTensor(name, path, dtype, tuple(shape), at)
        begin, end = entry["data_offsets"]
        if (first + begin, end - begin) != (at, tensor.nbytes):
            raise ValueError(
                f"{name}: {dtype}{shape} has {tensor.nbytes} bytes and follows byte {at - first}, "
                f"data_offsets are {[begin, end]}"
            )
        tensors.append(tensor)
        at += tensor.nbytes
    return tensors, at
