"""Work on a thread for a coroutine that may be cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def finished_in_thread(work: Callable[[], _T]) -> _T:
    """`work()`, on a thread of the loop's executor.

    A cancellation is raised when `work` has ended, since no thread can be stopped: what it has in hand (a
    mirror's lock, a claim, a segment) is free for what the caller does next. Its outcome is lost then.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                continue  # asked again: it is raised below
        running.exception()  # seen, so that nobody is told of it when the future goes
        raise
