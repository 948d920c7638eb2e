"""Rows of one stored tensor, read on demand."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np

from jaxtrain.huggingface.headers import StoredTensor
from rollout_bridge.errors import ExpectedError
from rollout_bridge.quantization.host import VALUE_OF_CODE

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(np.uint8),
}
BLOCK = 128
_LARGEST_READ = 1 << 30  # Linux reads at most 2 GiB at once
READABLE = ("F32", "F16", "BF16")


class TruncatedError(ExpectedError, OSError):
    """A file ends before a tensor does, although its size was right when it was opened."""


def read_rows(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of the first axis, in the stored dtype (FP8 as codes); the tensor if it has no axis.

    Allocates its result only.
    """
    dtype = _DTYPES[tensor.dtype]
    if not tensor.shape:
        return _read(tensor, tensor.offset, np.empty((), dtype))
    out = np.empty((stop - start, *tensor.shape[1:]), dtype)
    row_bytes = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
    return _read(tensor, tensor.offset + start * row_bytes, out)


def dequantize_rows(codes: StoredTensor, scales: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of an FP8 matrix in 128x128 blocks, float32: code times the scale of its block.

    Any scales, not only powers of two. Allocates its result and a few rows.
    """
    columns = codes.shape[1]
    out = np.empty((stop - start, columns), np.float32)
    first = start // BLOCK
    scale = read_rows(scales, first, -(-stop // BLOCK)).astype(np.float32)
    for row in range(start, stop, BLOCK):
        block_end = min(row // BLOCK * BLOCK + BLOCK, stop)
        for begin, end in ((row, block_end), (block_end, min(row + BLOCK, stop))):
            if begin < end:
                wide = np.repeat(scale[begin // BLOCK - first], BLOCK)[:columns]
                np.multiply(
                    VALUE_OF_CODE[read_rows(codes, begin, end)], wide, out=out[begin - start : end - start]
                )
    return out


def _read(tensor: StoredTensor, offset: int, out: np.ndarray) -> np.ndarray:
    """Fills `out` from the file. Raises `TruncatedError` naming tensor and file."""
    view = out.reshape(-1).view(np.uint8).data
    descriptor = os.open(tensor.file, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + _LARGEST_READ]], offset + done)
            if count == 0:
                raise TruncatedError(
                    f"{tensor.file}: ends before byte {offset + done}, inside {tensor.name}: it changed "
                    "while it was read"
                )
            done += count
    finally:
        os.close(descriptor)
    return out
