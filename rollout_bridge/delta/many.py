"""Many arrays' updates: which of them share a blob, and all of them in one.

The probabilities of a small array's update cost more to describe than they save, and its coder more time than
its changes. Arrays of one element width that change about as often (within a factor of four) are therefore
coded together (`group`); large ones alone (`codec`).

Layout: a version byte; for each array a varint, 0 if it does not change, else the number of its blob; then
each blob after its length as a varint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout_bridge.delta import codec, group
from rollout_bridge.delta.change import ArrayChange, DenseChange, SparseChange
from rollout_bridge.delta.classes import ClassRanks, fine_classes
from rollout_bridge.delta.errors import DeltaError
from rollout_bridge.delta.octets import Reader, varint

VERSION = 2
_ALONE = 1 << 20  # elements from which an array pays for its own statistics
_SPREAD = 4  # how much more often one array of a group may change than another


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


def together(changes: Sequence[ArrayChange]) -> list[list[int]]:
    """Which of `changes` share a blob, as ascending places in it; those that change nothing in none.

    Ordered by the first of each; of several arrays only such as `group.encode` takes.
    """
    groups: list[list[int]] = []
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, change in enumerate(changes):
        if len(change.indices) and change.size >= _ALONE:
            groups.append([place])
        elif len(change.indices):
            start = None if change.ranks is None else change.ranks.start
            alike.setdefault((change.old_values.dtype, change.old is None, start), []).append(place)
    for places in alike.values():
        groups += [sorted(members) for members in _as_often(changes, places)]
    return sorted(groups)


def encode_group(changes: Sequence[ArrayChange], *, preset: str = "small") -> bytes:
    """The blob of some that go `together`. Errors as `encode_sparse`."""
    if len(changes) > 1:
        return group.encode(changes, wide=codec.Preset(preset) is codec.Preset.fast)
    change = changes[0]
    return codec.encode_sparse(
        change.indices,
        change.old_values,
        change.new_values,
        shape=(change.size,),
        dtype=change.old_values.dtype,
        preset=preset,
        old=change.old,
        ranks=change.ranks,
    )


def encode_many(changes: Sequence[ArrayChange], *, preset: str = "small") -> bytes:
    """One blob of several updates. Errors as `encode_sparse`."""
    numbers = np.zeros(len(changes), np.int64)
    blobs = []
    for number, members in enumerate(together(changes)):
        numbers[members] = number + 1
        blobs.append(encode_group([changes[place] for place in members], preset=preset))
    head = bytes([VERSION]) + b"".join(varint(number) for number in numbers.tolist())
    return head + b"".join(varint(len(blob)) + blob for blob in blobs)


def decode_many(blob: bytes, olds: Sequence[np.ndarray]) -> list[SparseChange | DenseChange]:
    """The updates of an `encode_many` blob, one for each of `olds`, in order. Raises DeltaError as `decode`
    does.
    """
    reader = Reader(blob)
    version = reader.byte()
    if version != VERSION:
        raise DeltaError(
            f"the blob is of version {version}, this reader knows {VERSION}; upgrade the older side"
        )
    groups: list[list[int]] = []
    for place in range(len(olds)):
        number = reader.varint()
        if number > len(groups) + 1:
            raise DeltaError(f"array {place} is in blob {number}, {len(groups)} are known; it is damaged")
        if number == len(groups) + 1:
            groups.append([])
        if number:
            groups[number - 1].append(place)
    result: list[SparseChange | DenseChange] = [
        SparseChange(np.empty(0, np.int64), np.empty(0, old.dtype)) for old in olds
    ]
    for members in groups:
        body = reader.take(reader.varint())
        if len(members) == 1:
            result[members[0]] = codec.decode_sparse(body, olds[members[0]])
            continue
        decoded = group.decode(body, olds[members[0]].dtype)
        found = decoded.changes_of(range(len(members)), [olds[place] for place in members])
        for place, change in zip(members, found, strict=True):
            result[place] = change
    reader.end()
    return result


def _as_often(changes: Sequence[ArrayChange], places: list[int]) -> list[list[int]]:
    """`places` split into groups of arrays that change about as often, from the most seldom."""
    fraction = {place: len(changes[place].indices) / changes[place].size for place in places}
    groups: list[list[int]] = []
    lowest, elements, changed = 0.0, 0, 0
    for place in sorted(places, key=fraction.__getitem__):
        size, moved = changes[place].size, len(changes[place].indices)
        elements, changed = elements + size, changed + moved
        if (
            not groups
            or fraction[place] > _SPREAD * lowest
            or len(groups[-1]) >= group.MOST_ARRAYS
            or elements > group.MOST_ELEMENTS
            or changed > group.MOST_CHANGES
        ):
            groups.append([])
            lowest, elements, changed = fraction[place], size, moved
        groups[-1].append(place)
    return groups
