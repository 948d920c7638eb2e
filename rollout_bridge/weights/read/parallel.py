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
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST = 64  # of a host with more cores, which serves as well
_AHEAD = 4  # items a process that may be begun before the first of them is taken
_LOOK_SECONDS = 2.0  # between looks at whether what is waited for can still come


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
                    yield result(self._pool, begun[0][0])
                    held -= begun.popleft()[1]
                begun.append((self._pool.submit(work, item), price))
                held += price
            while begun:
                yield result(self._pool, begun[0][0])
                begun.popleft()
        except BrokenProcessPool as error:
            begun.clear()  # the pool ends all of them; one cancelled meanwhile would keep it from that
            self.close(wait=True)
            raise OSError(
                "a decoding process died: the kernel kills one when memory runs out (dmesg says so). Others "
                "are started for the next attempt; set fewer decoders if it happens again"
            ) from error
        finally:
            for future, _ in begun:
                future.cancel()
            try:
                _ended(self._pool, [future for future, _ in begun])
            except BrokenProcessPool:  # those that are left have ended with their processes
                self.close(wait=True)

    def close(self, *, wait: bool = False) -> None:
        """Ends the processes, or has them end."""
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)
            self._pool = None


def result(pool: Executor, future: Future[_Result]) -> _Result:
    """What `pool` makes of `future`. Raises what that raises, `BrokenProcessPool` if a process died.

    A pool of Python 3.11 forgets what it is handed at the moment when one of its processes dies: to wait for
    that alone could last for ever.
    """
    _ended(pool, [future])
    return future.result()


def _ended(pool: Executor, futures: list[Future[_Result]]) -> None:
    """Returns when all have. Raises `BrokenProcessPool` if the pool is broken and some never will."""
    while wait(futures, _LOOK_SECONDS).not_done:
        try:
            pool.submit(os.getpid)
        except BrokenProcessPool:
            raise
        except RuntimeError:  # it takes nothing new any more, and ends what it has
            continue


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
