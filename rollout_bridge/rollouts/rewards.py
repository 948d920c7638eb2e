"""Helpers for scoring: reading an answer out of a text, and running verifiers that may hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading

from rollout_bridge.errors import ExpectedError
from rollout_bridge.rollouts.environments.base import Environment, Score, Task
from rollout_bridge.trajectories.schema import Status

logger = logging.getLogger(__name__)


def tagged_answer(text: str, tag: str) -> str | None:
    """The stripped text between the last <tag> and the </tag> after it; None if there is no such pair."""
    _, opened, rest = text.rpartition(f"<{tag}>")
    answer, closed, _ = rest.partition(f"</{tag}>")
    return answer.strip() if opened and closed else None


class ScoringError(ExpectedError):
    """Verifiers hang faster than threads can be abandoned."""


class Scorer:
    """Scores in daemon threads, with a time limit: a verifier that hangs costs one thread, never the worker.

    timeout_seconds: of one score; past it the status is `TIMEOUT`.
    concurrency: scores running at once (Python threads: more helps only verifiers that wait).
    max_abandoned: threads left behind in hung verifiers at which `score` raises `ScoringError`.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        timeout_seconds: float,
        concurrency: int = 8,
        max_abandoned: int = 64,
    ) -> None:
        self._environment = environment
        self._timeout = timeout_seconds
        self._slots = asyncio.Semaphore(concurrency)
        self._max_abandoned = max_abandoned
        self._abandoned: list[threading.Thread] = []

    async def score(self, task: Task, text: str) -> Score:
        async with self._slots:
            self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
            if len(self._abandoned) >= self._max_abandoned:
                raise ScoringError(
                    f"{task.name}: {len(self._abandoned)} verifier calls hang past their "
                    f"{self._timeout} s limit; "
                    "fix the environment or raise the scoring timeout, then restart the worker"
                )
            return await self._run(task, text)

    async def _run(self, task: Task, text: str) -> Score:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Score] = loop.create_future()

        def deliver(score: Score) -> None:
            if not future.done():
                future.set_result(score)

        def work() -> None:
            try:
                score = self._environment.score(task, text)
            except Exception as error:  # a verifier bug is the environment's failure, reported in the row
                logger.warning(
                    "%s: scoring task %d raised %s: %s", task.name, task.index, type(error).__name__, error
                )
                score = Score(
                    components={},
                    total=0.0,
                    status=Status.ENVIRONMENT_FAILURE,
                    detail=f"{type(error).__name__}: {error}",
                )
            with contextlib.suppress(RuntimeError):  # the loop closed while this verifier hung: nobody waits
                loop.call_soon_threadsafe(deliver, score)

        thread = threading.Thread(target=work, name=f"score-{task.index}", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(self._timeout):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():  # it was in time, the loop was not
                return future.result()
            self._abandoned.append(thread)
            logger.warning("%s: scoring task %d took over %s s", task.name, task.index, self._timeout)
            return Score(
                components={},
                total=0.0,
                status=Status.TIMEOUT,
                detail=f"verifier took over {self._timeout} s",
            )
