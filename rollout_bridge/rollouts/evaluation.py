"""Evaluation requests: held-out prompts, greedy, at exactly one version. Never trained on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout_bridge.control import (
    EVALUATIONS_PREFIX,
    EvaluationClaim,
    EvaluationRequest,
    EvaluationResult,
    RecordError,
    read,
)
from rollout_bridge.engines.protocol import EngineError, FinishReason, Purpose
from rollout_bridge.rollouts.environments.base import Environment
from rollout_bridge.rollouts.episode import Policy, Sampling, play
from rollout_bridge.rollouts.generation import EngineCaller
from rollout_bridge.rollouts.scoring import ScoringPool
from rollout_bridge.rollouts.settings import WorkerSettings
from rollout_bridge.rollouts.transcript import Origin, Tokenizer
from rollout_bridge.store import Store
from rollout_bridge.trajectories import segment
from rollout_bridge.trajectories.groups import VALID
from rollout_bridge.trajectories.schema import Trajectory
from rollout_bridge.waiting import Unchanged

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Evaluator:
    """Finds evaluation requests and answers them, one worker each (a lease, as with prompts).

    environment: the held-out split. agent: keeps the engine at a version; "" if that is not known.
    closed: keys of requests that are answered, expired, or not for this engine.
    """

    store: Store
    caller: EngineCaller
    environment: Environment
    tokenizer: Tokenizer
    processes: ScoringPool
    settings: WorkerSettings
    worker: str
    stop_ids: tuple[int, ...]
    agent: str = ""
    closed: set[str] = field(default_factory=set)
    unchanged: Unchanged = field(default_factory=Unchanged)

    async def next(self) -> EvaluationRequest | None:
        """An unanswered request, claimed for this worker; None if there is none for its engine."""
        for key in await asyncio.to_thread(self.store.list, EVALUATIONS_PREFIX):
            if key in self.closed:
                continue
            try:
                evaluation = await asyncio.to_thread(read, self.store, EvaluationRequest, key)
            except RecordError as error:
                logger.warning("ignored evaluation request: %s", error)
                self.closed.add(key)
                continue
            if evaluation is None:
                continue
            answered = await asyncio.to_thread(self.store.read, evaluation.result_key)
            try:
                version = await self.caller.engine.version()
            except EngineError as error:
                logger.warning("engine %s does not report its version: %s", self.caller.engine.name, error)
                return None
            unchanged = self.unchanged.seconds(key, evaluation)
            if answered is not None or unchanged >= evaluation.expires_after:
                self.closed.add(key)
            elif version is not None and version > evaluation.version:
                logger.info(
                    "evaluation %s needs version %d, the engine is past it at %d",
                    evaluation.id,
                    evaluation.version,
                    version,
                )
                self.closed.add(key)
            elif await asyncio.to_thread(self._claim, evaluation):
                return evaluation
        return None

    async def run(self, evaluation: EvaluationRequest) -> None:
        """Generates, scores, logs the rows, then writes the result once.

        Leaves the request to others, without a result, if it expires first.
        """
        keeper = asyncio.create_task(self._keep(evaluation))
        deadline = time.monotonic() + evaluation.expires_after
        try:
            start, stop = evaluation.prompts
            if stop > (size := self.environment.size):
                problem = f"prompts up to {stop} asked for, the environment holds out {size}"
                await self._finish(evaluation, [], error=f"{problem}; hold out more or ask for fewer")
                return
            slots = asyncio.Semaphore(self.settings.max_concurrent_groups * self.settings.group_size)
            rows = await asyncio.gather(
                *(self._episode(evaluation, index, slots, deadline) for index in range(start, stop))
            )
            done = [row for row in rows if row is not None]
            if len(done) < len(rows):
                logger.warning(
                    "evaluation %s expired with %d of %d prompts answered",
                    evaluation.id,
                    len(done),
                    len(rows),
                )
            else:
                await self._finish(evaluation, done)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _episode(
        self, evaluation: EvaluationRequest, index: int, slots: asyncio.Semaphore, deadline: float
    ) -> Trajectory | None:
        """One held-out episode; None if the engine aborted it until `deadline` (monotonic seconds)."""
        settings = self.settings

        def policy(number: int) -> Policy:
            sampling = Sampling(
                request_id=f"eval-{evaluation.id}-{index}",
                seed=lambda turn, tries: 0,
                stop_ids=self.stop_ids,
                exact_version=evaluation.version,
                abort_retries=None,
                deadline=deadline,
            )
            origin = Origin(
                prompt_index=index,
                member=0,
                engine=self.caller.engine.name,
                worker=self.worker,
                temperature=0.0,
                purpose=Purpose.EVAL,
            )
            return Policy(self.caller, self.tokenizer, self.processes, sampling, origin)

        async with slots:
            limits = replace(settings.limits, seconds=float("inf"))
            [row, *_] = await play(
                self.environment, index, [policy], limits, tries=settings.task_tries, created_at=time.time
            )
        aborted = row.finish_reason == FinishReason.ABORT
        return None if aborted and time.monotonic() >= deadline else row

    async def _finish(
        self, evaluation: EvaluationRequest, rows: list[Trajectory], *, error: str = ""
    ) -> None:
        """Rows first, the result last: a reader of the result can read every row."""
        size = self.settings.segment_groups * self.settings.group_size
        for number, start in enumerate(range(0, len(rows), size)):
            data = segment.encode(rows[start : start + size], writer=self.worker, sequence=number)
            key = f"evaluations/{evaluation.id}/{self.worker}-{number}.parquet"
            await asyncio.to_thread(self.store.create, key, data)
        result = EvaluationResult(
            id=evaluation.id,
            version=evaluation.version,
            prompts=evaluation.prompts,
            worker=self.worker,
            time=time.time(),
            error=error,
            **summary(rows),
        )
        if not await asyncio.to_thread(self.store.create_json, result.key, result.to_json()):
            logger.warning("evaluation %s was answered by another worker meanwhile", evaluation.id)
        self.closed.add(evaluation.key)

    async def _keep(self, evaluation: EvaluationRequest) -> None:
        while True:
            await asyncio.sleep(self.settings.lease_seconds / 3)
            await asyncio.to_thread(self._claim, evaluation)

    def _claim(self, evaluation: EvaluationRequest) -> bool:
        """Takes or renews the request; False while another worker's lease is live."""
        key = evaluation.claim_key
        data, generation = self.store.read_with_generation(key)
        found = None if data is None else EvaluationClaim.parse(key, data)
        mine = EvaluationClaim(
            id=evaluation.id,
            worker=self.worker,
            agent=self.agent,
            lease_seconds=self.settings.lease_seconds,
            renewals=0 if found is None else found.renewals + 1,
        )
        if (
            found is not None
            and found.worker != self.worker
            and self.unchanged.seconds(key, found) < found.lease_seconds
        ):
            return False
        return self.store.swap_json(key, mine.to_json(), generation)


def summary(rows: Sequence[Trajectory]) -> dict[str, Any]:
    """Mean reward and components over valid rows; None where there is none. `failed` counts the others."""
    valid = [row for row in rows if row.status in VALID]
    names = sorted({name for row in valid for name in row.rewards})
    return {
        "count": len(valid),
        "failed": len(rows) - len(valid),
        "reward_mean": float(np.mean([row.reward for row in valid])) if valid else None,
        "components": {name: float(np.mean([row.rewards.get(name, 0.0) for row in valid])) for name in names},
        "mean_tokens": float(np.mean([row.trainable.sum() for row in valid])) if valid else None,
        "truncated": sum(row.finish_reason == FinishReason.LENGTH for row in valid),
    }
