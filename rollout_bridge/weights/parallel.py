"""The same work for many items by several processes, its results in order, its memory bounded.

Processes and not threads: decoding is a few hundred short calls of numpy a tensor, between which threads of
one interpreter wait for each other (two were slower than one).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST = 64  # of a host with more cores, which serves as well
_AHEAD = 4  # items a process that may be begun before the first of them is taken


def default_count() -> int:
    """One for each core this process may use, up to a limit."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0))))


class Workers:
    """`count` processes, started when there is first something for them; or none, if `count` is one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def in_order(
        self,
        work: Callable[[_Item], _Result],
        items: Iterable[_Item],
        *,
        here: bool,
        cost: Callable[[_Item], int],
        limit: int,
    ) -> Iterator[_Result]:
        """`work(item)` of each, in the order of `items`; both can be pickled. here: by the caller itself.

        cost: of an item, from its start until its result has been taken and the next one is asked for; those
        begun and not yet taken stay within `limit` in all, or are one. What the first item that fails raises
        is raised in its place; then, or when the caller stops, nothing is begun any more and what was begun
        has ended. Raises OSError if a process died.
        """
        if here or self.count == 1:
            for item in items:
                yield work(item)
            return
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")  # threads and an accelerator's client do not fork
            self._pool = ProcessPoolExecutor(self.count, spawn, initializer=begin)
        begun: deque[tuple[Future[_Result], int]] = deque()
        held = 0
        try:
            for item in items:
                price = cost(item)
                while begun and (held + price > limit or len(begun) >= _AHEAD * self.count):
                    yield begun[0][0].result()
                    held -= begun.popleft()[1]
                begun.append((self._pool.submit(work, item), price))
                held += price
            while begun:
                yield begun[0][0].result()
                begun.popleft()
        except BrokenProcessPool as error:
            self.close()
            raise OSError(
                "a decoding process died: the kernel kills one when memory runs out (dmesg says so). Others "
                "are started for the next attempt; set fewer decoders if it happens again"
            ) from error
        finally:
            for future, _ in begun:
                future.cancel()
            wait([future for future, _ in begun])

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def each(work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """`work` of several items in one go: a process is handed few large things faster than many small ones."""
    for item in items:
        work(item)


def begin() -> None:
    """In a new process: ends with its parent, however that dies, and not by a key pressed in the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
