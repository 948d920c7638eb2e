"""Tensors written to a directory as Hugging Face lays them out: safetensors shards with an index.

One tensor is in memory at a time, whatever the size of the model.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorOutput:
    """One tensor to write. `bits` makes its content when its turn comes.

    dtype: as safetensors names it, such as "BF16". nbytes: of what `bits` returns.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    bits: Callable[[], np.ndarray]


def split_into_shards(outputs: Sequence[TensorOutput], shard_bytes: int) -> list[list[TensorOutput]]:
    """Consecutive tensors, as many a shard as fit into `shard_bytes`; a larger tensor is alone in its own."""
    shards: list[list[TensorOutput]] = [[]]
    size = 0
    for output in outputs:
        if size and size + output.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    return shards


def write_tensors(outputs: Sequence[TensorOutput], directory: Path, shard_bytes: int) -> None:
    """Writes one file, or several with an index, durable on return; calls each `bits` once, in order."""
    shards = split_into_shards(outputs, shard_bytes)
    if len(shards) == 1:
        _write_file(directory / SINGLE_FILE, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / file, shard)
        weight_map |= {output.name: file for output in shard}
    total = sum(output.nbytes for output in outputs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _write_file(path: Path, outputs: Sequence[TensorOutput]) -> None:
    """The safetensors format: length of header, JSON header, contents."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in outputs:
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [offset, offset + output.nbytes],
        }
        offset += output.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for output in outputs:
            content = np.ascontiguousarray(output.bits())
            if content.nbytes != output.nbytes:
                raise ValueError(f"{output.name}: {content.nbytes} bytes to write, {output.nbytes} announced")
            file.write(content.data)
        file.flush()
        os.fsync(file.fileno())
