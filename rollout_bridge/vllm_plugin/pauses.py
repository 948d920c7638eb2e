"""`/pause` that answers when the engine has stopped.

vLLM 0.32 waits another 20 ms, so that its caller sees the last outputs before the answer. An update does not
need that order: every output carries the version that made it, from the engine's own process, and the
requests of a drained or aborted engine end when they are done.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def answer_when_stopped() -> None:
    """Take the wait out of `AsyncLLM.pause_generation`.

    Calling it again in the same process changes nothing.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    engine_client: Any = AsyncLLM
    own = inspect.unwrap(engine_client.pause_generation)

    @functools.wraps(own)
    async def pause(self: Any, *, mode: str = "abort", clear_cache: bool = True) -> None:
        if clear_cache:  # inputs held in this process; the engine empties its keys and values itself
            await self.renderer.clear_mm_cache_async()
        await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    engine_client.pause_generation = pause
