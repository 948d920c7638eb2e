"""Waiting with a timeout: look, sleep, look again, and say at the end what was waited for.

`wait_for` and `wait_for_async` raise when the time is up. `looks` is the loop beneath them, for a wait that
ends in another way. Time is monotonic. There is always at least one look, and the last is at the timeout.

`Unchanged` is how a lease or an expiry that another host wrote is judged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """A wait ended because the process is stopping."""


def sleep_unless(interrupted: Callable[[], bool]) -> Callable[[float], None]:
    """`time.sleep` that raises `Interrupted` within a moment of `interrupted()` being true."""

    def sleep(seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            if interrupted():
                raise Interrupted
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.1))

    return sleep


class Unchanged:
    """How long records of other processes have stayed as they are, by this process's own monotonic clock.

    A holder changes its record to renew it. So the clocks of two hosts are never compared, and a clock that
    is set to another time changes nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}

    def seconds(self, key: str, record: object) -> float:
        """Since this process first saw `record` at `key`; 0 if it saw another one there the last time."""
        now = self._clock()
        before, since = self._seen.get(key, (None, now))
        if before is None or before != record:
            self._seen[key] = (record, now)
            return 0.0
        return now - since


def looks(
    timeout: float, poll: float, *, slowest: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[float]:
    """One item for each look until `timeout` seconds have passed: the seconds to sleep after it.

    slowest: `poll` doubles after each look, up to this; None keeps it.
    """
    deadline = clock() + timeout
    left = timeout
    while left > 0:
        left = deadline - clock()
        yield max(0.0, min(poll, left))
        poll = poll if slowest is None else min(2 * poll, slowest)
    if timeout <= 0:
        yield 0.0


def wait_for(
    look: Callable[[], T | None],
    what: str | Callable[[], str],
    *,
    timeout: float,
    poll: float,
    error: type[Exception],
    slowest: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """The first value of `look()` that is not None. Either function may raise, which ends the wait.

    what: what is waited for, where, and what to do; a function is called only for the error.
    Raises `error`: "waited <timeout> s for <what>".
    """
    for pause in looks(timeout, poll, slowest=slowest, clock=clock):
        found = look()
        if found is not None:
            return found
        if pause:
            sleep(pause)
    raise error(_waited(timeout, what))


async def wait_for_async(
    look: Callable[[], Awaitable[T | None]],
    what: str | Callable[[], str],
    *,
    timeout: float,
    poll: float,
    error: type[Exception],
    slowest: float | None = None,
) -> T:
    """As `wait_for`, with a coroutine function that looks. Cancel the coroutine to stop the wait."""
    for pause in looks(timeout, poll, slowest=slowest):
        found = await look()
        if found is not None:
            return found
        await asyncio.sleep(pause)
    raise error(_waited(timeout, what))


def _waited(timeout: float, what: str | Callable[[], str]) -> str:
    return f"waited {timeout:g} s for {what if isinstance(what, str) else what()}"
