"""Many arrays' updates in one blob, with shared statistics.

The probabilities of a small array's update cost more to describe than they save. Arrays of one element
width that change about as often (within a factor of two) are therefore coded as if they were one array, end
to end; large ones alone.

Layout: a version byte; for each array a varint, 0 if it does not change, else the number of its group; then
  for each group the
length of its blob as a varint, and the blob.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rollout_bridge.delta import codec
from rollout_bridge.delta.classes import ClassRanks, fine_classes
from rollout_bridge.delta.codec import Dense, SparseChange
from rollout_bridge.delta.errors import DeltaError
from rollout_bridge.delta.octets import Reader, varint

_ALONE = 1 << 20  # elements from which an array pays for its own statistics
_GROUP_LIMIT = 1 << 24  # elements a group of several arrays may have: what a reader has to join


@dataclasses.dataclass(frozen=True)
class ArrayChange:
    """The update of one array: flat `indices` ascending, their `old_values` and `new_values`, the `size` of
    the array, and where the writer has them the whole `old` array or the `ranks` of the changed elements
    (`encode_sparse` says what they are good for).
    """

    indices: np.ndarray
    old_values: np.ndarray
    new_values: np.ndarray
    size: int
    old: np.ndarray | None = None
    ranks: ClassRanks | None = None

    @classmethod
    def between(cls, old: np.ndarray, new: np.ndarray) -> ArrayChange:
        """The update from `old` to `new`, of one shape and dtype."""
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError(
                f"an update keeps shape and dtype, found {old.dtype}{list(old.shape)} ->"
                f" {new.dtype}{list(new.shape)}"
            )
        old_flat, new_flat = np.ascontiguousarray(old).reshape(-1), np.ascontiguousarray(new).reshape(-1)
        indices = np.flatnonzero(old_flat != new_flat)
        return cls(indices, old_flat[indices], new_flat[indices], old.size, old_flat)


def split_stacked(
    positions: np.ndarray,
    old_values: np.ndarray,
    new_values: np.ndarray,
    *,
    counts: np.ndarray,
    size: int,
    ranks: np.ndarray | None = None,
    class_sizes: np.ndarray | None = None,
    start: int = 0,
) -> list[ArrayChange]:
    """The updates of the arrays of a stack [g, ...], from the changes of the whole stack.

    positions, old_values, new_values: of the changed elements, by flat position in the stack, ascending;
    counts int[g]: how many changes each array has; size: elements of one array. ranks int (of each changed
    element in its class, over the whole stack), class_sizes int[g, 16] and `start`: as
    `quantization.device.class_ranks` returns them, if it was asked.
    """
    ends = np.cumsum(np.asarray(counts, np.int64).reshape(-1))
    class_before = None if class_sizes is None else np.cumsum(class_sizes, axis=0) - class_sizes
    changes = []
    for place, (begin, end) in enumerate(zip(ends - np.asarray(counts).reshape(-1), ends, strict=True)):
        old_here = old_values[begin:end]
        in_class = None
        if ranks is not None and class_sizes is not None and class_before is not None:
            offsets = class_before[place].astype(np.int64)[fine_classes(old_here, start)]
            in_class = ClassRanks(ranks[begin:end] - offsets, class_sizes[place].astype(np.int64), start)
        indices = positions[begin:end].astype(np.int64) - place * size
        changes.append(ArrayChange(indices, old_here, new_values[begin:end], size, ranks=in_class))
    return changes


def encode_many(changes: Sequence[ArrayChange], *, preset: str = "small") -> bytes:
    """One blob of several updates: what a process publishes of a version. Errors as `encode_sparse`."""
    groups: list[list[ArrayChange]] = []
    open_groups: dict[tuple[object, ...], int] = {}
    numbers = bytearray()
    for change in changes:
        if not len(change.indices):
            numbers += varint(0)
            continue
        key = _group_key(change)
        number = open_groups.get(key)
        full = number is not None and sum(c.size for c in groups[number]) + change.size > _GROUP_LIMIT
        if number is None or full or _is_alone(change):
            groups.append([])
            number = len(groups) - 1
            if not _is_alone(change):
                open_groups[key] = number
        groups[number].append(change)
        numbers += varint(number + 1)
    blobs = [_encode_group(group, preset) for group in groups]
    return bytes([codec.VERSION]) + bytes(numbers) + b"".join(varint(len(blob)) + blob for blob in blobs)


def decode_many(blob: bytes, olds: Sequence[np.ndarray]) -> list[SparseChange | Dense]:
    """The updates of an `encode_many` blob, one for each of `olds`, in order. Raises DeltaError as `decode`
    does.
    """
    reader = Reader(blob)
    version = reader.byte()
    if version != codec.VERSION:
        raise DeltaError(
            f"the blob is of codec version {version}, this reader knows {codec.VERSION}; upgrade the"
            " older side"
        )
    members: list[list[int]] = []
    result: list[SparseChange | Dense] = []
    for place, old in enumerate(olds):
        number = reader.varint()
        if number > len(members) + 1:
            raise DeltaError(
                f"array {place} is of group {number}, {len(members)} are known; the blob is damaged"
            )
        if number == len(members) + 1:
            members.append([])
        if number:
            members[number - 1].append(place)
        result.append(SparseChange(np.empty(0, np.int64), np.empty(0, old.dtype)))
    for group in members:
        body = reader.take(reader.varint())
        for place, change in zip(group, _decode_group(body, [olds[place] for place in group]), strict=True):
            result[place] = change
    reader.end()
    return result


def _group_key(change: ArrayChange) -> tuple[object, ...]:
    octave = (change.size // len(change.indices)).bit_length()
    return change.old_values.dtype, octave, change.old is None


def _is_alone(change: ArrayChange) -> bool:
    return change.size >= _ALONE or change.ranks is not None


def _encode_group(group: list[ArrayChange], preset: str) -> bytes:
    if len(group) == 1:
        joined = group[0]
    else:
        preset = codec.Preset.small  # these arrays are, and telling classes apart then costs little time
        starts = np.cumsum([0, *(change.size for change in group)])
        olds = [change.old.reshape(-1) for change in group if change.old is not None]
        joined = ArrayChange(
            np.concatenate(
                [change.indices + start for change, start in zip(group, starts[:-1], strict=True)]
            ),
            np.concatenate([change.old_values for change in group]),
            np.concatenate([change.new_values for change in group]),
            int(starts[-1]),
            np.concatenate(olds) if len(olds) == len(group) else None,
        )
    return codec.encode_sparse(
        joined.indices,
        joined.old_values,
        joined.new_values,
        shape=(joined.size,),
        dtype=joined.old_values.dtype,
        preset=preset,
        old=joined.old,
        ranks=joined.ranks,
    )


def _decode_group(blob: bytes, olds: list[np.ndarray]) -> list[SparseChange | Dense]:
    if len(olds) == 1:
        return [codec.decode_sparse(blob, olds[0])]
    size = sum(old.size for old in olds)
    if size > _GROUP_LIMIT or len({old.dtype for old in olds}) > 1:
        raise DeltaError(
            f"a group joins {size} elements of {len({old.dtype for old in olds})} dtypes, past"
            f" {_GROUP_LIMIT} of one; "
            "the blob is damaged"
        )
    change = codec.decode_sparse(blob, np.concatenate([old.reshape(-1) for old in olds]))
    starts = np.cumsum([0, *(old.size for old in olds)])
    if isinstance(change, Dense):
        parts = np.split(change.values, starts[1:-1])
        return [Dense(part.reshape(old.shape)) for part, old in zip(parts, olds, strict=True)]
    edges = np.searchsorted(change.indices, starts)
    return [
        SparseChange(change.indices[begin:end] - start, change.values[begin:end])
        for begin, end, start in zip(edges[:-1], edges[1:], starts[:-1], strict=True)
    ]
