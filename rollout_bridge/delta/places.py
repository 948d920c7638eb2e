"""Where elements change, class after class: what the two ways of coding an update have in common.

Header: [exponent start, u8, if elements are wider than a byte] [partition mask, u16], both only where there
is more than one class.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools

import numpy as np

from rollout_bridge.delta import classes, models, symbols
from rollout_bridge.delta.blob import DeltaError, Reader
from rollout_bridge.delta.directory import Directory

FLAG_PARTITION = 1  # of a blob: there is more than one class
_SAMPLE = 1 << 16  # changed elements from which a partition is chosen
_SAMPLE_TO_CHOOSE = 1 << 13  # changed elements from which it is decided whether classes pay
_MODEL_BITS = 18.0  # about what describing one more class costs
_SORT_UP_TO = 24  # elements a change from which sorting the changes beats looking at every element
_CHUNK = 1 << 19  # elements merged at once: they stay within a core's cache
_SLICE = 1 << 16  # changes sorted at once, for the same reason
_LARGE = 1 << 18  # elements of an array that takes noticeable time
_TIME_SHARE = 0.004  # part of a large update that telling one more class apart has to save: it costs a pass


@dataclasses.dataclass(frozen=True)
class ClassChanges:
    """Changed elements class after class.

    start, mask: what describes the partition. sizes, moved: elements of each class, and those that change.
    steps: of their values, as `symbols.steps_between`; ranks: in their classes; both class
    after class.
    """

    start: int
    mask: int
    sizes: np.ndarray
    moved: np.ndarray
    steps: np.ndarray
    ranks: np.ndarray

    def header(self, itemsize: int) -> bytes:
        """The description of the partition; nothing when there is one class."""
        if not self.mask:
            return b""
        return (bytes([self.start]) if itemsize > 1 else b"") + self.mask.to_bytes(2, "little")

    def gaps(self) -> np.ndarray:
        """Unchanged elements of the class passed before each changed one, as integers of the ranks' dtype."""
        gaps = np.empty_like(self.ranks)
        gaps[:1] = self.ranks[:1]
        np.subtract(self.ranks[1:], self.ranks[:-1], out=gaps[1:])
        gaps[1:] -= 1
        firsts = (np.cumsum(self.moved) - self.moved)[self.moved > 0]
        gaps[firsts] = self.ranks[firsts]
        return gaps


def of_whole(indices: np.ndarray, old_values: np.ndarray, new_values: np.ndarray, size: int) -> ClassChanges:
    """One class: positions are the flat `indices` themselves."""
    steps = symbols.steps_between(old_values, new_values)
    return ClassChanges(0, 0, np.array([size]), np.array([indices.size]), steps, indices)


def of_ranks(old_values: np.ndarray, new_values: np.ndarray, ranks: classes.ClassRanks) -> ClassChanges:
    """All classes, from the ranks of the changed elements in them."""
    fine = classes.fine_classes(old_values, ranks.start)
    order = np.argsort(fine, kind="stable")
    moved = np.bincount(fine, minlength=classes.CLASSES)
    in_class = np.asarray(ranks.ranks, np.int64)[order]
    steps = symbols.steps_between(old_values, new_values)[order]
    return ClassChanges(ranks.start, classes.ALL_CLASSES, ranks.sizes, moved, steps, in_class)


class Effort(enum.Enum):
    """How many classes to use: two, which takes little time, or all that make an update smaller."""

    two = enum.auto()
    all = enum.auto()


def by_class(
    indices: np.ndarray, old_values: np.ndarray, new_values: np.ndarray, old: np.ndarray, effort: Effort
) -> ClassChanges:
    """The changes under the partition that makes the update of flat `old` smallest.

    A large array gets more classes only where they save enough to be worth the time.
    """
    start = classes.exponents_start(old)
    fine = classes.fine_classes(old_values, start)
    steps = symbols.steps_between(old_values, new_values)
    mask = partition(old, start, fine, steps, effort)
    boundaries = classes.used_boundaries(mask, old.dtype.itemsize, start)
    numbers = np.arange(len(boundaries) + 1, dtype=np.uint8)
    position = np.int32 if old.size < 1 << 31 else np.int64
    passed = np.zeros(numbers.size, np.int64)  # members of each class before the chunk
    moved = np.zeros(numbers.size, np.int64)
    ranks: list[list[np.ndarray]] = [[] for _ in numbers]
    ordered: list[list[np.ndarray]] = [[] for _ in numbers]
    begins = range(0, old.size, _CHUNK)
    edges = np.searchsorted(indices, [*begins, old.size]).tolist()
    for begin, first, end in zip(begins, edges[:-1], edges[1:], strict=True):
        directory = Directory.of(old[begin : begin + _CHUNK], boundaries)
        of_class = classes.merged_classes(fine[first:end], mask)
        order = np.argsort(of_class, kind="stable")
        ends = np.searchsorted(of_class.take(order), numbers, side="right")
        counts = np.diff(ends, prepend=0)
        local = directory.ranks_of_classes(counts, indices[first:end].take(order) - begin)
        local += np.repeat(passed, counts)
        for number, rank, step in zip(
            numbers.tolist(),
            np.split(local, ends[:-1]),
            np.split(steps[first:end].take(order), ends[:-1]),
            strict=True,
        ):
            ranks[number].append(rank.astype(position))
            ordered[number].append(step)
        passed += directory.sizes
        moved += counts
    return ClassChanges(
        start,
        mask,
        passed,
        moved,
        np.concatenate(list(itertools.chain(*ordered))),
        np.concatenate(list(itertools.chain(*ranks))),
    )


def read_directory(reader: Reader, old: np.ndarray, *, partitioned: bool) -> Directory:
    """The directory of flat `old` under the partition that `ClassChanges.header` describes."""
    return Directory.of(old, read_boundaries(reader, old.dtype, partitioned=partitioned))


def read_boundaries(reader: Reader, dtype: np.dtype, *, partitioned: bool) -> np.ndarray:
    """Magnitudes int64 that separate the classes of the partition that `ClassChanges.header` describes."""
    if not partitioned:
        return np.empty(0, np.int64)
    start = reader.byte() if dtype.itemsize > 1 else 0
    mask = reader.byte() | reader.byte() << 8
    if mask >> (classes.CLASSES - 1):
        raise DeltaError(f"partition {mask:#x} has boundaries past the last class; the blob is damaged")
    boundaries = classes.used_boundaries(mask, dtype.itemsize, start)
    return np.minimum(boundaries, np.iinfo(dtype).max)


def find(directory: Directory, gaps: list[np.ndarray]) -> list[np.ndarray]:
    """Flat positions int64 of the changed elements of each class, from their `gaps` int64.

    DeltaError where one lies past the end of its class.
    """
    found = []
    for number, (size, part) in enumerate(zip(directory.sizes.tolist(), gaps, strict=True)):
        if not part.size:
            found.append(part)
            continue
        if part.max() >= size:
            raise DeltaError("a decoded gap is out of range; the blob is damaged")
        ranks = np.cumsum(part)
        ranks += np.arange(part.size)
        if ranks[-1] >= size:
            raise DeltaError(
                "a changed element lies past the end of its class; the blob is of another array, or damaged"
            )
        found.append(directory.positions(number, ranks))
    return found


def ascending(
    indices: list[np.ndarray], values: list[np.ndarray], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The changes of several classes of an array of `size`, each ascending, as one ascending list."""
    joined, new = np.concatenate(indices), np.concatenate(values)
    if sum(1 for part in indices if part.size) < 2:
        return joined, new
    if joined.size * _SORT_UP_TO < size:
        order = np.argsort(joined, kind="stable")
        return joined[order], new[order]
    starts = np.arange(0, size + _CHUNK, _CHUNK)
    edges = [np.searchsorted(part, starts) for part in indices]
    joined, new = np.empty_like(joined), np.empty_like(new)
    changed, by_place = np.zeros(_CHUNK, bool), np.empty(_CHUNK, new.dtype)
    filled = 0
    for chunk, begin in enumerate(starts[:-1].tolist()):
        for part, value, edge in zip(indices, values, edges, strict=True):
            here = slice(edge[chunk], edge[chunk + 1])
            local = part[here] - begin
            changed[local] = True
            by_place[local] = value[here]
        found = np.flatnonzero(changed)
        changed[found] = False
        np.add(found, begin, out=joined[filled : filled + found.size])
        new[filled : filled + found.size] = by_place[found]
        filled += found.size
    return joined, new


def partition(
    old: np.ndarray,
    start: int,
    fine: np.ndarray,
    steps: np.ndarray,
    effort: Effort,
    class_bits: float = 0.0,
    time_share: float = _TIME_SHARE,
) -> int:
    """The mask of classes that makes the update of flat `old` smallest; fine, steps: of each changed element.

    class_bits: what one more class costs beside the description of its model. time_share: part of a large
    update that it has to save.
    """
    counts, changed, value_bits = _statistics(old, start, fine, steps)
    if effort is Effort.two:
        return classes.choose_boundary(counts, changed, value_bits)
    class_bits += _MODEL_BITS
    if old.size > _LARGE:
        every = classes.coded_bits(counts, changed, value_bits, classes.ALL_CLASSES)
        class_bits = max(class_bits, time_share * every)
    return classes.choose_partition(counts, changed, value_bits, class_bits)


def saved_by_two(old_values: np.ndarray, new_values: np.ndarray, old: np.ndarray) -> float:
    """About what part of the update of flat `old` two classes save over one, from samples of both."""
    each = slice(None, None, max(1, old_values.size // _SAMPLE_TO_CHOOSE))
    old, old_values, new_values = old[each], old_values[each], new_values[each]
    start = classes.exponents_start(old)
    fine = classes.fine_classes(old_values, start)
    statistics = _statistics(old, start, fine, symbols.steps_between(old_values, new_values))
    whole = classes.coded_bits(*statistics, 0)
    return 1 - classes.coded_bits(*statistics, classes.choose_boundary(*statistics)) / max(whole, 1.0)


def _statistics(
    old: np.ndarray, start: int, fine: np.ndarray, steps: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(elements int64[16], changes int64[16], bits of the values of classes i..j float64[16, 16])."""
    bits = old.dtype.itemsize * 8
    stride = max(1, fine.size // _SAMPLE)
    keys = fine[::stride].astype(np.int64) * models.ALPHABET + symbols.symbols_of(steps[::stride])
    joint = np.bincount(keys, minlength=classes.CLASSES * models.ALPHABET)
    histograms = joint.reshape(classes.CLASSES, models.ALPHABET) * stride
    changed = histograms.sum(axis=1)
    used = np.flatnonzero(histograms.any(axis=0))
    family_costs = histograms[:, used] @ models.step_costs(bits)[:, used].T
    sums = np.concatenate([np.zeros((1, family_costs.shape[1])), np.cumsum(family_costs, axis=0)])
    value_bits = (sums[None, 1:] - sums[:-1, None]).min(axis=-1)
    return classes.estimate_counts(old, start, changed), changed, value_bits
