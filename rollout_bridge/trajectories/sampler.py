"""Length- and freshness-aware sampling (Solar Open 2, arXiv 2607.20062): a surplus is kept in length bins,
each step draws evenly from the bins, and inside a bin the oldest goes first.

Pure: which item comes next depends on the items and the cursor, never on the order they are given in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What is drawn."""

    @property
    def tokens(self) -> int: ...

    @property
    def age_key(self) -> tuple[float | int | str, ...]:
        """Sorts the oldest first; unique."""
        ...


C = TypeVar("C", bound=Candidate)


def length_bin(tokens: int, edges: Sequence[int]) -> int:
    """Bin i holds lengths in [edges[i-1], edges[i]); there are len(edges) + 1 bins."""
    return bisect_right(edges, tokens)


def draw_order(items: Iterable[C], *, edges: Sequence[int], cursor: int) -> Iterator[tuple[C, int]]:
    """Every item once, one from each bin in turn from bin `cursor` on, each with the next cursor."""
    bins: list[list[C]] = [[] for _ in range(len(edges) + 1)]
    for item in items:
        bins[length_bin(item.tokens, edges)].append(item)
    queues = [sorted(queue, key=lambda item: item.age_key, reverse=True) for queue in bins]
    bin_index = cursor % len(queues)
    while any(queues):
        if queues[bin_index]:
            yield queues[bin_index].pop(), (bin_index + 1) % len(queues)
        bin_index = (bin_index + 1) % len(queues)
