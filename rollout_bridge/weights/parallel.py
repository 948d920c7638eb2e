"""The same work for many items on several threads, its results in order, its memory bounded."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_THREADS = 32  # past these the threads mostly wait for each other: an item holds the interpreter a while
_AHEAD = 4  # items a thread that may be begun before the first of them is taken


def default_threads() -> int:
    """One for each core this process may use, up to a limit."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def in_order(
    work: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    threads: int,
    cost: Callable[[_Item], int],
    limit: int,
) -> Iterator[_Result]:
    """`work(item)` of each, in the order of `items`, on `threads`; by the caller's thread if it is one.

    cost: of an item, from its start until its result has been taken and the next one is asked for; those
    begun and not yet taken stay within `limit` in all, or are one. What the first item that fails raises is
    raised in its place; then, or when the caller stops, nothing is begun any more and what was begun has
    ended.
    """
    if threads == 1:
        for item in items:
            yield work(item)
        return
    begun: deque[tuple[Future[_Result], int]] = deque()
    held = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            for item in items:
                price = cost(item)
                while begun and (held + price > limit or len(begun) >= _AHEAD * threads):
                    yield begun[0][0].result()
                    held -= begun.popleft()[1]
                begun.append((pool.submit(work, item), price))
                held += price
            while begun:
                yield begun[0][0].result()
                begun.popleft()
        finally:
            for future, _ in begun:
                future.cancel()
            wait([future for future, _ in begun])
