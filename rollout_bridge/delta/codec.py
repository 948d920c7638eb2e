"""Codec of weight updates (first, simple form): gap-coded positions and value steps, compressed by zstandard."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
import zstandard

_DTYPES = ("uint8", "uint16", "uint32")
_HEADER = struct.Struct("<BQQ")


class DeltaError(ValueError):
    """A blob is not an update of the array it was applied to."""


@dataclasses.dataclass(frozen=True)
class SparseChange:
    """The elements that change: flat `indices` int64, ascending, and their new `values`."""

    indices: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Dense:
    """All new values of an array, in its shape."""

    values: np.ndarray


def encode(old: np.ndarray, new: np.ndarray, *, preset: str = "small") -> bytes:
    """The update from `old` to `new` (bits uint8, uint16 or uint32, same shape and dtype)."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"found {old.dtype}{list(old.shape)} -> {new.dtype}{list(new.shape)}; an update keeps both")
    old_flat, new_flat = old.reshape(-1), new.reshape(-1)
    indices = np.flatnonzero(old_flat != new_flat)
    sparse = encode_sparse(
        indices, old_flat[indices], new_flat[indices], shape=old.shape, dtype=old.dtype, preset=preset
    )
    return min(sparse, encode_full(new, preset=preset), key=len) if indices.size else sparse


def encode_sparse(
    indices: np.ndarray,
    old_values: np.ndarray,
    new_values: np.ndarray,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype | type | str,
    preset: str = "small",
) -> bytes:
    """The update of an array of `shape` whose elements at flat `indices` (ascending) go from `old_values` to `new_values`."""
    kind = _DTYPES.index(np.dtype(dtype).name)
    gaps = np.diff(indices, prepend=-1).astype(np.uint64)
    planes = gaps.view(np.uint8).reshape(-1, 8).T
    steps = (new_values - old_values).astype(np.dtype(dtype))
    body = np.ascontiguousarray(planes).tobytes() + steps.tobytes()
    size = int(np.prod(shape, dtype=np.int64))
    return _HEADER.pack(kind, size, len(indices)) + zstandard.compress(body, 3)


def encode_full(new: np.ndarray, *, preset: str = "small") -> bytes:
    """All values of `new`, for a version that has no parent."""
    kind = _DTYPES.index(new.dtype.name)
    planes = np.ascontiguousarray(new).reshape(-1).view(np.uint8).reshape(-1, new.dtype.itemsize).T
    return _HEADER.pack(kind | 0x80, new.size, new.size) + zstandard.compress(np.ascontiguousarray(planes).tobytes(), 3)


def decode(blob: bytes, old: np.ndarray) -> np.ndarray:
    """The array after the update. Raises DeltaError when the blob is damaged or belongs to another array."""
    change = decode_sparse(blob, old)
    if isinstance(change, Dense):
        return change.values
    new = old.copy()
    new.reshape(-1)[change.indices] = change.values
    return new


def decode_sparse(blob: bytes, old: np.ndarray) -> SparseChange | Dense:
    """The update as changed elements, or densely when it was kept so."""
    kind, count, body = _open(blob, old.size, old.dtype)
    if kind & 0x80:
        return Dense(_full(body, old.shape, old.dtype))
    item = old.dtype.itemsize
    if len(body) != count * (8 + item):
        raise DeltaError("damaged blob")
    gaps = np.ascontiguousarray(np.frombuffer(body, np.uint8, count * 8).reshape(8, -1).T).view(np.int64).reshape(-1)
    if (gaps < 1).any() or (gaps > old.size).any():
        raise DeltaError("damaged blob")
    indices = np.cumsum(gaps) - 1
    if count and indices[-1] >= old.size:
        raise DeltaError("damaged blob")
    steps = np.frombuffer(body, old.dtype, count, count * 8)
    return SparseChange(indices, old.reshape(-1)[indices] + steps)


def decode_full(blob: bytes, shape: tuple[int, ...], dtype: np.dtype | type | str) -> np.ndarray:
    """The array of an `encode_full` blob."""
    dtype = np.dtype(dtype)
    kind, _, body = _open(blob, int(np.prod(shape, dtype=np.int64)), dtype)
    if not kind & 0x80:
        raise DeltaError("the blob holds an update, not a whole array")
    return _full(body, shape, dtype)


def encode_many(changes: Sequence[tuple[np.ndarray, np.ndarray]], *, preset: str = "small") -> bytes:
    """Several updates (old, new) in one blob."""
    blobs = [encode(old, new, preset=preset) for old, new in changes]
    return b"".join(struct.pack("<Q", len(blob)) + blob for blob in blobs)


def decode_many(blob: bytes, olds: Sequence[np.ndarray]) -> list[SparseChange | Dense]:
    """The updates of an `encode_many` blob, in its order."""
    out, at = [], 0
    for old in olds:
        if at + 8 > len(blob):
            raise DeltaError("truncated blob")
        (length,) = struct.unpack_from("<Q", blob, at)
        if at + 8 + length > len(blob):
            raise DeltaError("truncated blob")
        out.append(decode_sparse(blob[at + 8 : at + 8 + length], old))
        at += 8 + length
    if at != len(blob):
        raise DeltaError("trailing bytes")
    return out


def _open(blob: bytes, size: int, dtype: np.dtype) -> tuple[int, int, bytes]:
    if len(blob) < _HEADER.size:
        raise DeltaError(f"truncated blob of {len(blob)} bytes")
    kind, found, count = _HEADER.unpack_from(blob)
    if found != size or kind & 0x7F >= len(_DTYPES) or np.dtype(_DTYPES[kind & 0x7F]) != dtype or count > size:
        raise DeltaError(f"the blob is for {found} elements, the array has {size} of {dtype}")
    limit = size * dtype.itemsize if kind & 0x80 else count * (8 + dtype.itemsize)
    try:
        body = zstandard.ZstdDecompressor().decompressobj().decompress(blob[_HEADER.size :])
    except zstandard.ZstdError as error:
        raise DeltaError(f"damaged blob: {error}") from error
    if len(body) > limit:
        raise DeltaError("damaged blob")
    return kind, count, body


def _full(body: bytes, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64))
    if len(body) != size * dtype.itemsize:
        raise DeltaError("damaged blob")
    planes = np.frombuffer(body, np.uint8).reshape(dtype.itemsize, size)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape)
