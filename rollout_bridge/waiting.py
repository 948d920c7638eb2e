"""Waiting with a timeout: look, wait, look again, and say at the end what was waited for.

`wait_for` raises when the time is up. `looks` is the loop beneath it, for a wait that goes on without error.
Each has an asynchronous form. Time is monotonic, and there is always at least one look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def looks(
    timeout: float,
    poll: float,
    *,
    slowest: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Yields once for each look: now, then every `poll` seconds until `timeout` seconds have passed.

    slowest: the pause doubles after each look up to this many seconds; None keeps it at `poll`.
    """
    deadline = clock() + timeout
    for pause in _pauses(poll, slowest):
        yield
        if clock() >= deadline:
            return
        sleep(pause)


async def looks_async(timeout: float, poll: float, *, slowest: float | None = None) -> AsyncIterator[None]:
    """As `looks`, in a coroutine."""
    deadline = time.monotonic() + timeout
    for pause in _pauses(poll, slowest):
        yield
        if time.monotonic() >= deadline:
            return
        await asyncio.sleep(pause)


def wait_for(
    look: Callable[[], T | None],
    what: str | Callable[[], str],
    *,
    timeout: float,
    poll: float,
    error: type[Exception],
    slowest: float | None = None,
    between: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """The first value of `look()` that is not None.

    what: what is waited for, where, and what to do; a function is called only for the error.
    between: called after each look that found nothing; it may raise, to stop the wait.
    Raises `error`: "waited <timeout> s for <what>".
    """
    for _ in looks(timeout, poll, slowest=slowest, clock=clock, sleep=sleep):
        found = look()
        if found is not None:
            return found
        between()
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
    async for _ in looks_async(timeout, poll, slowest=slowest):
        found = await look()
        if found is not None:
            return found
    raise error(_waited(timeout, what))


def _pauses(poll: float, slowest: float | None) -> Iterator[float]:
    pause = poll
    while True:
        yield pause
        pause = poll if slowest is None else min(2 * pause, slowest)


def _waited(timeout: float, what: str | Callable[[], str]) -> str:
    return f"waited {timeout:g} s for {what if isinstance(what, str) else what()}"
