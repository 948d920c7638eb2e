"""Asking an engine until it answers: bounded retries around `RolloutEngine.generate`, and the settings of a
worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rollout_bridge.engines.protocol import Completion, EngineError, FinishReason, Request, RolloutEngine
from rollout_bridge.errors import ExpectedError
from rollout_bridge.rollouts.episodes import check_completion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker samples, and how patient it is. Seconds throughout.

    run_seed: of all sampling seeds of the run. group_size: answers to each prompt (GRPO's G).
    stop_ids: tokens that end an answer; empty: the tokenizer's end-of-sequence token.
    max_concurrent_groups: groups generated at once; what fills the engine's batch.
    claim_groups: prompt indices claimed at a time. lease_seconds: of a claim, renewed at a third of it.
    segment_groups, flush_seconds: a segment is written at that many groups, or that long after the first of
        them.
    score_timeout_seconds: of one verifier call.
    generate_timeout_seconds: of one call of the engine. abort_retries: of an answer the engine aborted.
    engine_timeout_seconds: how long an engine may fail or be unready before the worker gives up.
    idle_timeout_seconds: how long nothing may be there to do. poll_seconds: between looks at the store.
    """

    run_seed: int
    group_size: int
    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    max_concurrent_groups: int = 8
    claim_groups: int = 8
    lease_seconds: float = 120.0
    segment_groups: int = 8
    flush_seconds: float = 30.0
    score_timeout_seconds: float = 10.0
    generate_timeout_seconds: float = 1800.0
    abort_retries: int = 3
    engine_timeout_seconds: float = 900.0
    idle_timeout_seconds: float = 7200.0
    poll_seconds: float = 1.0

    def __post_init__(self) -> None:
        at_least_one = ("group_size", "max_tokens", "max_concurrent_groups", "claim_groups", "segment_groups")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"rollouts.{name}: {getattr(self, name)} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"rollouts.temperature: {self.temperature} is negative; 0 is greedy")


class WorkerError(ExpectedError):
    """A worker cannot go on; the message names what it waited for and the remedy."""


async def wait_ready(
    engine: RolloutEngine,
    *,
    timeout: float,
    poll: float,
    patient: Callable[[], Awaitable[bool]] | None = None,
) -> None:
    """Returns when the engine admits requests.

    Raises `WorkerError` after `timeout` seconds, unless `patient` then says that waiting is right.
    """
    deadline = time.monotonic() + timeout
    while True:
        health = await engine.health()
        if health.ready:
            return
        if time.monotonic() >= deadline and patient is not None and await patient():
            deadline = time.monotonic() + timeout
        elif time.monotonic() >= deadline:
            raise WorkerError(
                f"waited {timeout:g} s for engine {engine.name} to be ready: "
                f"{health.reason or 'it gives no reason'}. "
                "Look at the engine's log and at the sync agent beside it"
            )
        await asyncio.sleep(poll)


async def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    *,
    settings: WorkerSettings,
    again: Callable[[Request, int], Request],
    abort_retries: int | None,
    deadline: float,
) -> list[tuple[Request, Completion]]:
    """A checked completion of every request, with the request that led to it.

    again: the request to ask after `n` tries. abort_retries: of aborted answers, None for no limit but the
        deadline
    (unix seconds, of aborts); past either, the aborted answer is returned.
    Raises `WorkerError` when the engine kept failing for `settings.engine_timeout_seconds`.
    """
    answers: dict[int, tuple[Request, Completion]] = {}
    asked = dict(enumerate(requests))
    tries, aborts, failing_since = 0, 0, None
    while asked:
        try:
            async with asyncio.timeout(settings.generate_timeout_seconds):
                completions = await engine.generate(list(asked.values()))
            for request, completion in zip(asked.values(), completions, strict=True):
                check_completion(completion, request, engine=engine.name)
        except (EngineError, TimeoutError, ValueError) as error:
            failing_since = time.monotonic() if failing_since is None else failing_since
            logger.warning("engine %s failed (try %d): %s", engine.name, tries, error or type(error).__name__)
            if time.monotonic() - failing_since >= settings.engine_timeout_seconds:
                raise WorkerError(
                    f"engine {engine.name} failed for {settings.engine_timeout_seconds:g} s, last "
                    f"with: {error!r}. "
                    "Restart the engine, then this worker; its claims pass on meanwhile"
                ) from error
        else:
            failing_since = None
            for (position, request), completion in zip(asked.items(), completions, strict=True):
                answers[position] = (request, completion)
            asked = {i: answers[i][0] for i in asked if answers[i][1].finish_reason is FinishReason.ABORT}
            aborts += 1
            if (abort_retries is not None and aborts > abort_retries) or time.time() >= deadline:
                break
        tries += 1
        asked = {i: again(requests[i], tries) for i in asked}
        if asked:
            await asyncio.sleep(min(settings.poll_seconds * 2 ** min(tries - 1, 5), 30.0))
    return [answers[position] for position in range(len(requests))]
