"""Best-fit packing of whole documents into rows of one length, for plans and for the batches made of them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from rollout_bridge.errors import ExpectedError


class PackingError(ExpectedError, ValueError):
    """A document that does not fit in a row; names its length and the remedy."""


def positions(tokens: int) -> int:
    """Positions that a document of `tokens` tokens takes: one for each prediction, at least one."""
    return max(tokens - 1, 1)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of document indices, best-fit decreasing; ties keep the order given."""
    free: list[tuple[int, int]] = []  # (space left, bin), sorted
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise PackingError(
                f"document {index} has {length} tokens, more than batch.sequence_length {capacity}: "
                "raise batch.sequence_length or lower the limits of prompts and answers"
            )
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            bins.append([])
            space, bin_index = capacity, len(bins) - 1
        else:
            space, bin_index = free.pop(at)
        bins[bin_index].append(index)
        bisect.insort(free, (space - length, bin_index))
    return bins


class Room:
    """What is left of `rows` rows of `capacity` positions while documents are added one by one.

    length: positions of a document.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.total = rows * capacity
        self.used = 0
        self.rows, self.capacity = rows, capacity
        self._lengths: list[int] = []
        self._free = [capacity] * rows  # of each row, ascending
        self._too_long = capacity + 1  # shortest length that did not fit

    def add(self, length: int) -> bool:
        """Adds a document; False if it does not fit."""
        if length >= self._too_long:
            return False
        at = bisect.bisect_left(self._free, length)
        if at < len(self._free):
            bisect.insort(self._free, self._free.pop(at) - length)
        elif not self._packed_again(length):
            self._too_long = length
            return False
        self._lengths.append(length)
        self.used += length
        return True

    def _packed_again(self, length: int) -> bool:
        """Whether all of it with one more fits when packed anew; then that packing is taken."""
        lengths = [*self._lengths, length]
        if sum(lengths) > self.total:
            return False
        bins = best_fit(lengths, self.capacity)
        if len(bins) > self.rows:
            return False
        free = [self.capacity - sum(lengths[index] for index in members) for members in bins]
        self._free = sorted(free + [self.capacity] * (self.rows - len(bins)))
        return True
