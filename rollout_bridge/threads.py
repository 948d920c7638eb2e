"""Work on a thread for a coroutine that may be cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def finished_in_thread(work: Callable[[], _T]) -> _T:
    """`work()`, on a thread of the loop's executor.

    No thread can be stopped, so a cancellation is raised when `work` has ended. What `work` held (a mirror's
    lock, a claim, a segment) is free then, and its outcome is lost.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                continue  # cancelled again: raised below
        running.exception()  # retrieved, or asyncio logs that it never was
        raise
