"""One function over many items in several processes: results in order, memory bounded.

Processes and not threads: decoding is a few hundred short numpy calls a tensor, and threads wait for the
interpreter lock between them (two threads were slower than one).
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

_MOST = 64  # on a host with more cores: it also serves
_AHEAD = 4  # items for each process that may be started before the first result is taken
_LOOK_SECONDS = 2.0  # between checks that the pool still works


def default_count() -> int:
    """The cores this process may use, up to a limit."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0))))


class Workers:
    """`count` processes, started for their first item; none if `count` is one."""

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
        """`work(item)` of each item, in order. here: in the calling process; else both are pickled.

        cost: of an item, from its start until the result after it is asked for. The items in progress cost at
        most `limit` together, or there is only one. An error of an item is raised in its place. After an
        error, or when the caller stops, no item is started and those in progress have ended. Raises OSError
        if a process died.
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
            begun.clear()  # the pool fails them all, which it could not do if one were cancelled meanwhile
            self.close(wait=True)
            raise OSError(
                "a decoding process died: the kernel kills one when memory runs out (see dmesg). Others "
                "are started for the next attempt; set fewer decoders if it happens again"
            ) from error
        finally:
            for future, _ in begun:
                future.cancel()
            try:
                _ended(self._pool, [future for future, _ in begun])
            except BrokenProcessPool:  # the others ended with their processes
                self.close(wait=True)

    def close(self, *, wait: bool = False) -> None:
        """Ends the processes. wait: returns when they have ended."""
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)
            self._pool = None


def result(pool: Executor, future: Future[_Result]) -> _Result:
    """The result of `future` of `pool`. Raises its error, or `BrokenProcessPool` if a process died.

    A pool of Python 3.11 loses an item that is submitted while one of its processes dies, so
    `future.result()` alone could wait for ever.
    """
    _ended(pool, [future])
    return future.result()


def _ended(pool: Executor, futures: list[Future[_Result]]) -> None:
    """Waits for all. Raises `BrokenProcessPool` if the pool is broken, so that some will never end."""
    while wait(futures, _LOOK_SECONDS).not_done:
        try:
            pool.submit(os.getpid)
        except BrokenProcessPool:
            raise
        except RuntimeError:  # shut down: it finishes what it has
            continue


def each(work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """`work` of several items in one call: fewer messages between processes."""
    for item in items:
        work(item)


def begin() -> None:
    """In a new process: exits when its parent dies, and ignores Ctrl-C in the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
