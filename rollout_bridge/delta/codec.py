"""One array's update as a self-describing blob.

A blob is a byte (version 2 bits, mode 2, element width 2, flags 2), the number of elements as a varint, and
a body: nothing when nothing changed; changes, as a `stream` when they are few or as `planes` when they are
many; or every new value when that is shorter. Bodies of whole values are the byte planes of the array, most
significant apart, compressed by zstandard. Where it is not clear which is shortest, several are made and the
shortest is kept.
"""

from __future__ import annotations

import enum
import math

import numpy as np
import zstandard

from rollout_bridge.delta import places, planes, stream
from rollout_bridge.delta.blob import (
    DTYPES,
    ArrayChange,
    DeltaError,
    DenseChange,
    Reader,
    SparseChange,
    inflate,
    varint,
)
from rollout_bridge.delta.classes import CLASSES, ClassRanks

VERSION = 1
_DENSE_FROM = 0.25  # changed fraction from which sending every value is tried
_CLASSES_ARE_CHEAP = 1 << 16  # elements up to which telling classes apart costs no time worth saving
_RARE = 256  # elements a change; up to it the preset fast uses classes only if they save much
_WORTH_A_PASS = 0.25  # part of the update that it has to save then
_SAMPLE_RUNS, _SAMPLE_RUN = 8, 1 << 13
_PLANES_FROM = 1 << 12  # changes from which planes may be shorter than a stream
_STREAM_UP_TO = 1 << 16  # changes up to which a stream takes little time


class Preset(enum.StrEnum):
    """small: near the entropy of the update. fast: a fifth to a half larger, about twice as quick."""

    small = "small"
    fast = "fast"


class _Mode(enum.IntEnum):
    unchanged = 0
    stream = 1
    full = 2
    planes = 3


def encode(old: np.ndarray, new: np.ndarray, *, preset: str = "small") -> bytes:
    """The update from `old` to `new`: bit patterns uint8, uint16 or uint32 of any shape, the same in both.

    Raises ValueError on other dtypes, on shapes that differ, or on an unknown preset.
    """
    return encode_change(ArrayChange.between(old, new), preset=preset)


def encode_change(change: ArrayChange, *, preset: str = "small") -> bytes:
    """The update of one array. Errors as `encode_sparse`."""
    return encode_sparse(
        change.indices,
        change.old_values,
        change.new_values,
        shape=(change.size,),
        dtype=change.old_values.dtype,
        preset=preset,
        old=change.old,
        ranks=change.ranks,
    )


def encode_sparse(
    indices: np.ndarray,
    old_values: np.ndarray,
    new_values: np.ndarray,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype | type | str,
    preset: str = "small",
    old: np.ndarray | None = None,
    ranks: ClassRanks | None = None,
) -> bytes:
    """The update of an array of `shape` and `dtype` whose elements at flat `indices` (ascending) change.

    To model how likely each element is to change, the codec needs the whole `old` array, or the `ranks` of
    the changed elements in their classes; with neither, the update is about 1.4 times as large. `old` is
    better for small arrays; the preset `fast` does not use it for a large array of which much changes. An
    array most of which changes is stored whole if that is shorter and all new values are known: from `old`,
    or all listed. Raises ValueError on indices that are not ascending and in range, or values that do not
    change.
    """
    dtype, size = _checked_dtype(dtype), math.prod(shape)
    fast = Preset(preset) is Preset.fast
    indices = np.asarray(indices, np.int64).reshape(-1)
    old_values, new_values = (np.asarray(each, dtype).reshape(-1) for each in (old_values, new_values))
    if not indices.size == old_values.size == new_values.size:
        raise ValueError(
            f"found {indices.size} indices, {old_values.size} old and {new_values.size} new values;"
            " expected one each"
        )
    if not indices.size:
        return _head(_Mode.unchanged, dtype, 0, size)
    if indices[0] < 0 or indices[-1] >= size or (indices[1:] <= indices[:-1]).any():
        raise ValueError(f"the indices are not strictly ascending within [0, {size})")
    if (old_values == new_values).any():
        raise ValueError("an element listed as changed keeps its value; list only those that change")
    if old is not None and (old.size != size or old.dtype != dtype):
        raise ValueError(
            f"the old array is {old.dtype}{list(old.shape)}, the update is of {dtype}{list(shape)}"
        )
    if ranks is not None and (ranks.ranks.size != indices.size or ranks.sizes.shape != (CLASSES,)):
        raise ValueError(
            f"found {ranks.ranks.size} ranks and class sizes {list(ranks.sizes.shape)} for {indices.size} "
            f"changes; expected one rank a change, and [{CLASSES}]"
        )
    old_flat = None if old is None else np.ascontiguousarray(old).reshape(-1)
    if ranks is not None:
        changes = places.of_ranks(old_values, new_values, ranks)
    elif old_flat is None:
        changes = places.of_whole(indices, old_values, new_values, size)
    elif not fast or size <= _CLASSES_ARE_CHEAP:
        changes = places.by_class(indices, old_values, new_values, old_flat, places.Effort.all)
    elif (
        indices.size * _RARE <= size or places.saved_by_two(old_values, new_values, old_flat) > _WORTH_A_PASS
    ):
        changes = places.by_class(indices, old_values, new_values, old_flat, places.Effort.two)
    else:
        changes = places.of_whole(indices, old_values, new_values, size)
    candidates = []
    if indices.size >= _PLANES_FROM:
        flags, body = planes.encode(changes)
        candidates.append(_head(_Mode.planes, dtype, flags, size) + body)
    if indices.size < (_PLANES_FROM if fast else _STREAM_UP_TO):
        flags, body = stream.encode(changes, wide=fast)
        candidates.append(_head(_Mode.stream, dtype, flags, size) + body)
    best = min(candidates, key=len)
    if indices.size > _DENSE_FROM * size and (old_flat is not None or indices.size == size):
        new = np.empty(size, dtype) if old_flat is None else old_flat.copy()
        new[indices] = new_values
        if _likely_bytes(new, preset) < len(best):
            best = min(best, encode_full(new, preset=preset), key=len)
    return best


def encode_full(new: np.ndarray, *, preset: str = "small") -> bytes:
    """All values of `new`, for a version that has no parent."""
    dtype = _checked_dtype(new.dtype)
    level = 3 if Preset(preset) is Preset.small else 1
    octets = np.ascontiguousarray(new).reshape(-1).view(np.uint8).reshape(-1, dtype.itemsize)
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    return _head(_Mode.full, dtype, 0, new.size) + compressor.compress(octets.T.tobytes())


def decode(blob: bytes, old: np.ndarray) -> np.ndarray:
    """The array after the update; `old` is not touched.

    Raises DeltaError when the blob is damaged or belongs to another array. Damage inside the coded values
    may go unseen: a caller checks the digest of the result.
    """
    found = _read(blob, old)
    if isinstance(found, DenseChange):
        return found.values
    new = np.array(old, order="C")
    flat = new.reshape(-1)
    for indices, values in zip(*found, strict=True):
        flat[indices] = values
    return new


def decode_sparse(blob: bytes, old: np.ndarray) -> SparseChange | DenseChange:
    """The update of `old`: the elements that change, or all values. Errors as `decode`.

    Memory is bounded by a small multiple of the array, also for a damaged blob.
    """
    found = _read(blob, old)
    return found if isinstance(found, DenseChange) else SparseChange(*places.ascending(*found, old.size))


def decode_full(blob: bytes, shape: tuple[int, ...], dtype: np.dtype | type | str) -> np.ndarray:
    """The array of an `encode_full` blob. Raises DeltaError if it is damaged or of another kind or size."""
    dtype = _checked_dtype(dtype)
    mode, _, reader = _open(blob, math.prod(shape), dtype)
    if mode is not _Mode.full:
        raise DeltaError(
            f"the blob holds an update ({mode.name}), a whole array was expected; read its parent first"
        )
    return _read_full(reader, tuple(shape), dtype)


def _likely_bytes(new: np.ndarray, preset: str) -> int:
    """About the bytes of `encode_full`, from runs of a large array; 0 for a small one: try it."""
    if new.size <= 2 * _SAMPLE_RUNS * _SAMPLE_RUN:
        return 0
    starts = np.linspace(0, new.size - _SAMPLE_RUN, _SAMPLE_RUNS).astype(np.int64)
    sample = np.concatenate([new[start : start + _SAMPLE_RUN] for start in starts])
    return len(encode_full(sample, preset=preset)) * new.size // sample.size


def _read(blob: bytes, old: np.ndarray) -> DenseChange | tuple[list[np.ndarray], list[np.ndarray]]:
    """All new values, or the (ascending indices, new values) of each class of elements."""
    mode, flags, reader = _open(blob, old.size, _checked_dtype(old.dtype))
    if mode is _Mode.full:
        return DenseChange(_read_full(reader, old.shape, old.dtype))
    if mode is _Mode.unchanged:
        reader.end()
        return [np.empty(0, np.int64)], [np.empty(0, old.dtype)]
    form = stream if mode is _Mode.stream else planes
    return form.decode(flags, reader.rest(), np.ascontiguousarray(old).reshape(-1))


def _head(mode: _Mode, dtype: np.dtype, flags: int, size: int) -> bytes:
    return bytes([VERSION << 6 | mode << 4 | DTYPES.index(dtype) << 2 | flags]) + varint(size)


def _open(blob: bytes, size: int, dtype: np.dtype) -> tuple[_Mode, int, Reader]:
    reader = Reader(blob)
    first = reader.byte()
    version, mode, width, flags = first >> 6, first >> 4 & 3, first >> 2 & 3, first & 3
    if version != VERSION:
        raise DeltaError(
            f"the blob is of codec version {version}, this reader knows {VERSION}; upgrade the older side"
        )
    found = reader.varint()
    if width >= len(DTYPES) or DTYPES[width] != dtype or found != size:
        raise DeltaError(
            f"the blob updates {found} elements of {2**width} bytes, the array has {size} of "
            f"{dtype.itemsize}; it belongs to another tensor"
        )
    if flags and mode not in (_Mode.stream, _Mode.planes):
        raise DeltaError(
            f"the blob starts with {first:#x}, which means nothing in version {VERSION}; it is damaged"
        )
    return _Mode(mode), flags, reader


def _read_full(reader: Reader, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    content = inflate(reader.rest(), math.prod(shape) * dtype.itemsize)
    octets = np.frombuffer(content, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(octets.T).view(dtype).reshape(shape)


def _checked_dtype(dtype: np.dtype | type | str) -> np.dtype:
    found = np.dtype(dtype)
    if found not in DTYPES:
        raise ValueError(f"the codec takes bit patterns ({', '.join(d.name for d in DTYPES)}), found {found}")
    return found
