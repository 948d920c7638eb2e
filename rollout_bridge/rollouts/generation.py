"""Bounded retries around `RolloutEngine.generate`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from rollout_bridge.engines.protocol import Completion, EngineError, FinishReason, Request, RolloutEngine
from rollout_bridge.engines.routing import implausible
from rollout_bridge.rollouts.settings import WorkerError
from rollout_bridge.waiting import wait_for_async

logger = logging.getLogger(__name__)


class NoAnswer(Exception):
    """The engine answers other requests, but not this one."""


@dataclass(kw_only=True)
class EngineCaller:
    """An engine with its timeouts and retries. Shared by all episodes of a worker.

    timeout_seconds: of one call. patience_seconds: how long an engine may fail. poll_seconds: before the
    second try; doubled after each. answered_at: monotonic time of the engine's last good answer.
    """

    engine: RolloutEngine
    timeout_seconds: float
    patience_seconds: float
    poll_seconds: float
    answered_at: float = float("-inf")


def derive_seed(run_seed: int, prompt_index: int, member: int, attempt: int, turn: int = 0) -> int:
    """A sampling seed in [0, 2^31), a hash of its origins."""
    text = f"{run_seed}/{prompt_index}/{member}/{attempt}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


async def wait_ready(
    engine: RolloutEngine,
    *,
    timeout: float,
    poll: float,
    patient: Callable[[], Awaitable[bool]] | None = None,
) -> None:
    """Returns when the engine admits requests.

    Raises `WorkerError` after `timeout` seconds, unless `patient` then returns True.
    """
    reason = ""

    async def look() -> bool | None:
        nonlocal reason
        health = await engine.health()
        reason = health.reason or "it gives no reason"
        return True if health.ready else None

    def what() -> str:
        return (
            f"engine {engine.name} to be ready: {reason}. Look at the engine's log and at the sync agent "
            "beside it"
        )

    while True:
        try:
            await wait_for_async(look, what, timeout=timeout, poll=poll, error=WorkerError)
            return
        except WorkerError:
            if patient is None or not await patient():
                raise


async def generate(
    caller: EngineCaller,
    request: Request,
    *,
    seed: Callable[[int], int],
    abort_retries: int | None,
    deadline: float,
) -> tuple[Request, Completion]:
    """A checked completion of the request, with the request as it was sent.

    seed: of the n-th try. abort_retries: of aborted answers, None for no limit but the deadline (monotonic
    seconds, of aborts); past either, the aborted answer is returned.

    Raises `WorkerError` when the engine has failed for the caller's patience, and `NoAnswer` when it has
    failed this request for so long but answered others.
    """
    engine = caller.engine
    tries, aborts, failing_since = 0, 0, None
    while True:
        asked = replace(request, seed=seed(tries))
        try:
            async with asyncio.timeout(caller.timeout_seconds):
                [completion] = await engine.generate([asked])
            check_completion(completion, asked, engine=engine.name)
            completion = without_implausible_experts(completion, asked, engine=engine.name)
        except (EngineError, TimeoutError, ValueError) as error:
            now = time.monotonic()
            failing_since = now if failing_since is None else failing_since
            problem = str(error) or f"no answer in {caller.timeout_seconds:g} s"
            logger.warning("engine %s failed (try %d): %s", engine.name, tries, problem)
            if now - failing_since >= caller.patience_seconds:
                if caller.answered_at > failing_since:
                    raise NoAnswer(f"engine {engine.name} answers others: {problem}") from error
                raise WorkerError(
                    f"engine {engine.name} failed for {caller.patience_seconds:g} s, last with: {problem}. "
                    "Restart the engine, then this worker; its claims pass on meanwhile"
                ) from error
        else:
            caller.answered_at, failing_since = time.monotonic(), None
            aborts += completion.finish_reason is FinishReason.ABORT
            exhausted = abort_retries is not None and aborts > abort_retries
            if (
                completion.finish_reason is not FinishReason.ABORT
                or exhausted
                or time.monotonic() >= deadline
            ):
                return asked, completion
        tries += 1
        await asyncio.sleep(min(caller.poll_seconds * 2 ** min(tries - 1, 5), 30.0))


def check_completion(completion: Completion, request: Request, *, engine: str) -> None:
    """Raises `EngineError` unless the completion keeps the contract of `RolloutEngine` for this request."""
    tokens = len(completion.token_ids)

    def expect(condition: bool | np.bool_, message: str) -> None:
        if not condition:
            raise EngineError(f"{engine}: completion of {request.request_id} breaks the contract: {message}")

    expect(completion.request_id == request.request_id, f"it is the one of {completion.request_id}")
    expect(tokens <= request.max_tokens, f"{tokens} tokens, more than max_tokens {request.max_tokens}")
    expect(tokens > 0 or completion.finish_reason is FinishReason.ABORT, "no tokens, and it was not aborted")
    expect(completion.logprobs.shape == (tokens,), f"log-probs have shape {completion.logprobs.shape}")
    expect(np.isfinite(completion.logprobs).all(), "a log-prob is not finite")
    edges = [span.start for span in completion.spans] + [tokens]
    expect(
        edges[0] == 0 and all(span.end == end for span, end in zip(completion.spans, edges[1:], strict=True)),
        f"version spans {completion.spans} do not cover {tokens} tokens",
    )
    expect(
        all(span.version >= 0 for span in completion.spans),
        f"spans {completion.spans} have a negative version",
    )
    if request.exact_version is not None and completion.finish_reason is not FinishReason.ABORT:
        versions = {span.version for span in completion.spans}
        expect(
            versions == {request.exact_version},
            f"versions {versions}, asked for {request.exact_version} exactly",
        )


def without_implausible_experts(completion: Completion, request: Request, *, engine: str) -> Completion:
    """The completion; without its experts if no router can have chosen them. They are never worth a retry."""
    if completion.routed_experts is None:
        return completion
    tokens = len(request.prompt_ids) + len(completion.token_ids)
    problem = implausible(completion.routed_experts, tokens=tokens)
    if not problem:
        return completion
    logger.warning("%s: the routed experts of %s are left out: %s", engine, request.request_id, problem)
    return replace(completion, routed_experts=None)
