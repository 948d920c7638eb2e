"""The updates of many small arrays of one element width in one blob, any of which decodes alone.

All share the partition into classes, the statistics and the coder, which are what a small array's update
costs in bytes and in time. Positions are ranks inside one array's class, so that an array needs no other to
be decoded: only the coded symbols are read for all at once, and no old values take part in that.

Layout: a byte (version 2 bits, element width 2, flags of `stream` 4); a varint, how many runs of arrays of
one size there are, and for each run two, arrays and size; the `places` header if flagged; a varint a class,
its elements in all arrays; the models of `stream`; the changes of each array in each class that changes,
class after class, as a `_pack` of bytes; then the rANS states and words and the extra bits of `stream`, whose
symbols go class after class and inside a class array after array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import zstandard

from rollout_bridge.delta import classes, places, stream, symbols
from rollout_bridge.delta.blob import DTYPES, ArrayChange, DeltaError, Reader, SparseChange, inflate, varint
from rollout_bridge.delta.directory import Directory, Members

VERSION = 2
MOST_ARRAYS = 1 << 12
MOST_ELEMENTS = 1 << 24
MOST_CHANGES = 1 << 20
_BYTE = 255
_BLOCK = 1 << 20  # elements times classes of arrays looked at together: they stay within a core's cache
_TIME_SHARE = {False: 0.004, True: 0.02}  # part of the update that one more class has to save, by `wide`
_COUNT_BITS = 3.0  # about the cost of the number of changes of one array in one more class


@dataclasses.dataclass(frozen=True)
class Group:
    """A decoded group, not yet applied: at most MOST_CHANGES ranks and steps, also from a damaged blob.

    sizes int64[arrays]; counts int64[classes, arrays]: changes of each; firsts, of the same shape: where they
    begin in `ranks` int64 (in the class of the array, ascending) and `steps` (of the arrays' dtype).
    """

    sizes: np.ndarray
    boundaries: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray
    ranks: np.ndarray
    steps: np.ndarray

    @property
    def changes(self) -> int:
        return self.ranks.size

    def change(self, number: int, old: np.ndarray) -> SparseChange:
        """The update of array `number`, whose bits were `old`. DeltaError if that is another array."""
        return self.changes_of([number], [old])[0]

    def changes_of(self, numbers: Sequence[int], olds: Sequence[np.ndarray]) -> list[SparseChange]:
        """The updates of the arrays `numbers`, whose bits were `olds`. Many at once take a tenth of the time.

        DeltaError if one is another array. Needs memory for a small multiple of a mebibyte or of the largest.
        """
        flats = [np.ascontiguousarray(old).reshape(-1) for old in olds]
        for number, flat in zip(numbers, flats, strict=True):
            self._check(number, flat)
        found: list[SparseChange] = []
        begin, limit = 0, _BLOCK // (self.boundaries.size + 1)
        while begin < len(flats):
            end, size = begin + 1, flats[begin].size
            while end < len(flats) and size + flats[end].size <= limit:
                size, end = size + flats[end].size, end + 1
            found += self._changes_of_block(np.asarray(numbers[begin:end], np.int64), flats[begin:end])
            begin = end
        return found

    def _check(self, number: int, flat: np.ndarray) -> None:
        if number >= self.sizes.size or self.sizes[number] != flat.size or self.steps.dtype != flat.dtype:
            found = f"{self.sizes[number]} elements" if number < self.sizes.size else "nothing"
            raise DeltaError(
                f"array {number} of the group is {found} of {self.steps.dtype}, the tensor has {flat.size} of"
                f" {flat.dtype}; the blob belongs to another tensor"
            )

    def _changes_of_block(self, numbers: np.ndarray, flats: list[np.ndarray]) -> list[SparseChange]:
        joined = flats[0] if len(flats) == 1 else np.concatenate(flats)
        starts = np.zeros(len(flats) + 1, np.int64)
        np.cumsum([flat.size for flat in flats], out=starts[1:])
        members = Members.of(joined, self.boundaries)
        passed = members.passed(starts)
        counts = self.counts[:, numbers]
        each = counts.reshape(-1)
        ends = np.cumsum(each)
        at = np.arange(ends[-1]) + np.repeat(self.firsts[:, numbers].reshape(-1) - (ends - each), each)
        ranks = self.ranks[at]
        some = each > 0
        if (ranks[ends[some] - 1] >= np.diff(passed, axis=-1).reshape(-1)[some]).any():
            raise DeltaError(
                "a changed element lies past the end of its class; the blob is of another array, or damaged"
            )
        ranks += np.repeat(passed[:, :-1].reshape(-1), each)
        positions = members.positions(ranks)
        values = symbols.apply_steps(joined[positions], self.steps[at])
        order = np.argsort(positions, kind="stable")
        positions, values = positions[order], values[order]
        per_array = counts.sum(axis=0)
        positions -= np.repeat(starts[:-1], per_array)
        edges = np.cumsum(per_array).tolist()
        parts = map(slice, [0, *edges[:-1]], edges)
        return [SparseChange(positions[part], values[part]) for part in parts]


def encode(changes: Sequence[ArrayChange], *, wide: bool) -> bytes:
    """One blob of `changes`, all of one dtype and all with `old`, all with `ranks` of one start, or neither.

    wide: many lanes, quicker and a few percent larger. Raises ValueError past the limits above, if nothing
    changes, or on indices that are not ascending and in range or values that do not change.
    """
    sizes = np.array([change.size for change in changes], np.int64)
    per_array = np.array([change.indices.size for change in changes], np.int64)
    if len(changes) > MOST_ARRAYS or sizes.sum() > MOST_ELEMENTS or not 0 < per_array.sum() <= MOST_CHANGES:
        raise ValueError(
            f"a group of {len(changes)} arrays, {sizes.sum()} elements and {per_array.sum()} changes; at most"
            f" {MOST_ARRAYS}, {MOST_ELEMENTS} and 1 to {MOST_CHANGES} go together"
        )
    old_values = np.concatenate([change.old_values for change in changes])
    new_values = np.concatenate([change.new_values for change in changes])
    itemsize = old_values.dtype.itemsize
    owner = np.repeat(np.arange(len(changes)), per_array)
    starts = np.cumsum(sizes) - sizes
    indices = np.concatenate([change.indices for change in changes])
    inside = (indices >= 0) & (indices < sizes[owner])
    indices = indices + starts[owner]
    if not inside.all() or (indices[1:] <= indices[:-1]).any() or (old_values == new_values).any():
        raise ValueError(
            "the indices of an array are not strictly ascending in it, or a value stays as it is"
        )
    placed, counts = _places(changes, indices, old_values, new_values, owner, starts, sizes, wide=wide)
    coder = stream.Coder(_gaps(placed.ranks, counts), placed.steps, placed.sizes, placed.moved, 8 * itemsize)
    flags = (stream.FLAG_WIDE if wide else 0) | (places.FLAG_PARTITION if placed.mask else 0)
    return b"".join(
        [
            bytes([VERSION << 6 | DTYPES.index(old_values.dtype) << 4 | flags]),
            _write_sizes(sizes),
            placed.header(itemsize),
            *(varint(size) for size in placed.sizes.tolist()),
            coder.models,
            _pack(counts[placed.moved > 0]),
            coder.coded(flags),
        ]
    )


def decode(blob: bytes, dtype: np.dtype) -> Group:
    """The group of an `encode` blob. DeltaError on damage, or if it is not of `dtype`.

    Needs memory for MOST_CHANGES changes at most; `Group.change` for a small multiple of its array.
    """
    reader = Reader(blob)
    first = reader.byte()
    version, width, flags = first >> 6, first >> 4 & 3, first & 15
    if version != VERSION or flags & ~(stream.FLAG_WIDE | places.FLAG_PARTITION):
        raise DeltaError(
            f"the blob starts with {first:#x}, no group of codec version {VERSION}; upgrade the older side"
        )
    if width >= len(DTYPES) or DTYPES[width] != dtype:
        raise DeltaError(f"the blob updates elements of {2**width} bytes, the tensor is {dtype}")
    sizes = _read_sizes(reader)
    boundaries = places.read_boundaries(reader, dtype, partitioned=bool(flags & places.FLAG_PARTITION))
    class_sizes = np.array([reader.varint() for _ in range(boundaries.size + 1)], np.int64)
    if class_sizes.max() > MOST_ELEMENTS or class_sizes.sum() != sizes.sum():
        raise DeltaError(f"the classes do not add up to {sizes.sum()} elements; the blob is damaged")
    moved, tables = stream.read_models(reader, class_sizes, 8 * dtype.itemsize)
    if moved.sum() > MOST_CHANGES:
        raise DeltaError(f"a group of {moved.sum()} changes, at most {MOST_CHANGES}; the blob is damaged")
    counts = np.zeros((moved.size, sizes.size), np.int64)
    counts[moved > 0] = _unpack(reader, int((moved > 0).sum()) * sizes.size).reshape(-1, sizes.size)
    if (counts.sum(axis=1) != moved).any() or (counts.sum(axis=0) > sizes).any():
        raise DeltaError("the changes of the arrays do not add up to those of the group; the blob is damaged")
    gaps, steps = stream.read_coded(reader, moved, tables, flags, 8 * dtype.itemsize)
    firsts = np.cumsum(counts).reshape(counts.shape) - counts
    return Group(sizes, boundaries, counts, firsts, _ranks(gaps, counts), steps.astype(dtype))


def _places(
    changes: Sequence[ArrayChange],
    indices: np.ndarray,
    old_values: np.ndarray,
    new_values: np.ndarray,
    owner: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    *,
    wide: bool,
) -> tuple[places.ClassChanges, np.ndarray]:
    """(places, changes int64[classes, arrays]) of `indices` into the arrays end to end.

    Ranks are inside the class of one array.
    """
    steps = symbols.steps_between(old_values, new_values)
    olds = [change.old for change in changes if change.old is not None]
    ranks = [change.ranks for change in changes if change.ranks is not None]
    if len(ranks) == len(changes):
        start, mask = ranks[0].start, classes.ALL_CLASSES
        of_class = classes.fine_classes(old_values, start)
        class_sizes = np.sum([each.sizes for each in ranks], axis=0)
        in_class = np.concatenate([each.ranks for each in ranks]).astype(np.int64)
        order = np.argsort(of_class, kind="stable")
        in_class = in_class[order]
    elif len(olds) == len(changes):
        joined = np.concatenate([old.reshape(-1) for old in olds])
        start = classes.exponents_start(joined)
        fine = classes.fine_classes(old_values, start)
        mask = places.partition(
            joined, start, fine, steps, places.Effort.all, _COUNT_BITS * len(changes), _TIME_SHARE[wide]
        )
        of_class = classes.merged_classes(fine, mask)
        directory = Directory.of(joined, classes.used_boundaries(mask, joined.dtype.itemsize, start))
        class_sizes = directory.sizes
        order = np.argsort(of_class, kind="stable")
        ends = np.cumsum(np.bincount(of_class, minlength=class_sizes.size))
        in_class = np.empty_like(indices)
        for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            here = order[begin:end]
            before = directory.ranks(number, starts)[owner[here]]
            in_class[begin:end] = directory.ranks(number, indices[here]) - before
    else:
        start, mask = 0, 0
        of_class, order = np.zeros(indices.size, np.uint8), np.arange(indices.size)
        class_sizes, in_class = np.array([sizes.sum()]), indices - starts[owner]
    of_both = of_class.astype(np.int64) * sizes.size + owner
    counts = np.bincount(of_both, minlength=class_sizes.size * sizes.size).reshape(-1, sizes.size)
    return places.ClassChanges(start, mask, class_sizes, counts.sum(axis=1), steps[order], in_class), counts


def _gaps(ranks: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Unchanged elements passed before each changed one, from the start of the class of its array."""
    gaps = np.diff(ranks, prepend=-1) - 1
    flat = counts.reshape(-1)
    firsts = (np.cumsum(flat) - flat)[flat > 0]
    gaps[firsts] = ranks[firsts]
    return gaps


def _ranks(gaps: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ranks of `_gaps`."""
    ranks = np.cumsum(gaps + 1)
    flat = counts.reshape(-1)
    ends = np.cumsum(flat)
    before = np.concatenate([[0], ranks])[ends - flat]
    return ranks - np.repeat(before, flat) - 1


def _write_sizes(sizes: np.ndarray) -> bytes:
    edges = np.flatnonzero(np.diff(sizes, prepend=-1))
    lengths = np.diff(edges, append=sizes.size)
    runs = zip(lengths.tolist(), sizes[edges].tolist(), strict=True)
    return varint(edges.size) + b"".join(varint(length) + varint(size) for length, size in runs)


def _read_sizes(reader: Reader) -> np.ndarray:
    """int64[arrays], within the limits above."""
    parts, arrays, elements = [np.empty(0, np.int64)], 0, 0
    for _ in range(reader.varint()):
        length, size = reader.varint(), reader.varint()
        arrays, elements = arrays + length, elements + length * size
        if not length or arrays > MOST_ARRAYS or elements > MOST_ELEMENTS:
            raise DeltaError(
                f"a group of {arrays} arrays and {elements} elements or more, at most {MOST_ARRAYS} and"
                f" {MOST_ELEMENTS} go together; the blob is damaged"
            )
        parts.append(np.full(length, size, np.int64))
    return np.concatenate(parts)


def _pack(counts: np.ndarray) -> bytes:
    """Integers as bytes, those from 255 on also as 4 bytes each; both compressed."""
    flat = counts.reshape(-1)
    small = np.minimum(flat, _BYTE).astype(np.uint8).tobytes()
    content = small + flat[flat >= _BYTE].astype("<u4").tobytes()
    frame = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(content)
    return varint(len(content)) + varint(len(frame)) + frame


def _unpack(reader: Reader, count: int) -> np.ndarray:
    """`count` integers int64 of `_pack`."""
    size = reader.varint()
    if not count <= size <= 5 * count:
        raise DeltaError(f"{size} bytes for {count} numbers of changes; the blob is damaged")
    content = inflate(reader.take(reader.varint()), size)
    found = np.frombuffer(content, np.uint8, count).astype(np.int64)
    large = np.flatnonzero(found == _BYTE)
    if size != count + 4 * large.size:
        raise DeltaError("the numbers of changes have another length than announced; the blob is damaged")
    found[large] = np.frombuffer(content, "<u4", offset=count)
    return found
