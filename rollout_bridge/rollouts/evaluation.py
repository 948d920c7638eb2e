"""Evaluation requests: held-out prompts, greedy, at exactly one version. Never trained on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_bridge.control import EVALUATIONS_PREFIX, EvaluationRequest, EvaluationResult, RecordError, read
from rollout_bridge.engines.protocol import EngineError, FinishReason, Purpose, RolloutEngine
from rollout_bridge.rollouts.environments.base import Environment
from rollout_bridge.rollouts.episode import Policy, Sampling, play
from rollout_bridge.rollouts.generation import EngineCaller
from rollout_bridge.rollouts.scoring import ScoringPool
from rollout_bridge.rollouts.settings import WorkerSettings
from rollout_bridge.rollouts.transcript import Limits, Origin, Tokenizer
from rollout_bridge.store import Store
from rollout_bridge.trajectories import segment
from rollout_bridge.trajectories.groups import VALID
from rollout_bridge.trajectories.schema import Trajectory

logger = logging.getLogger(__name__)


class Evaluator:
    """Finds evaluation requests and answers them, one worker each (a lease, as with prompts)."""

    def __init__(
        self,
        store: Store,
        caller: EngineCaller,
        environment: Environment,
        tokenizer: Tokenizer,
        processes: ScoringPool,
        settings: WorkerSettings,
        *,
        worker: str,
        stop_ids: Sequence[int],
    ) -> None:
        self._store = store
        self._caller = caller
        self._engine: RolloutEngine = caller.engine
        self._environment = environment
        self._tokenizer = tokenizer
        self._processes = processes
        self._settings = settings
        self._worker = worker
        self._stop_ids = tuple(stop_ids)
        self._closed: set[str] = set()  # answered, expired, or not for this engine

    async def next(self) -> EvaluationRequest | None:
        """An unanswered request, claimed for this worker; None if there is none for its engine."""
        for key in await asyncio.to_thread(self._store.list, EVALUATIONS_PREFIX):
            if key in self._closed:
                continue
            try:
                evaluation = await asyncio.to_thread(read, self._store, EvaluationRequest, key)
            except RecordError as error:
                logger.warning("ignored evaluation request: %s", error)
                self._closed.add(key)
                continue
            if evaluation is None:
                continue
            answered = await asyncio.to_thread(self._store.read, evaluation.result_key)
            try:
                version = await self._engine.version()
            except EngineError as error:
                logger.warning("engine %s does not report its version: %s", self._engine.name, error)
                return None
            if answered is not None or evaluation.expires <= time.time():
                self._closed.add(key)
            elif version is not None and version > evaluation.version:
                logger.info(
                    "evaluation %s needs version %d, the engine is past it at %d",
                    evaluation.id,
                    evaluation.version,
                    version,
                )
                self._closed.add(key)
            elif await asyncio.to_thread(self._claim, evaluation):
                return evaluation
        return None

    async def run(self, evaluation: EvaluationRequest) -> None:
        """Generates, scores, logs the rows, then writes the result once.

        Leaves the request to others, without a result, if it expires first.
        """
        keeper = asyncio.create_task(self._keep(evaluation))
        try:
            start, stop = evaluation.prompts
            if stop > (size := self._environment.size):
                problem = f"prompts up to {stop} asked for, the environment holds out {size}"
                await self._finish(evaluation, [], error=f"{problem}; hold out more or ask for fewer")
                return
            slots = asyncio.Semaphore(self._settings.max_concurrent_groups * self._settings.group_size)
            rows = await asyncio.gather(
                *(self._episode(evaluation, index, slots) for index in range(start, stop))
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
        self, evaluation: EvaluationRequest, index: int, slots: asyncio.Semaphore
    ) -> Trajectory | None:
        """One held-out episode; None if the engine aborted it until the request expired."""
        settings = self._settings

        def policy(number: int) -> Policy:
            sampling = Sampling(
                request_id=f"eval-{evaluation.id}-{index}",
                seed=lambda turn, tries: 0,
                stop_ids=self._stop_ids,
                exact_version=evaluation.version,
                abort_retries=None,
                deadline=evaluation.expires,
            )
            origin = Origin(
                prompt_index=index,
                member=0,
                engine=self._engine.name,
                worker=self._worker,
                temperature=0.0,
                purpose=Purpose.EVAL,
            )
            return Policy(self._caller, self._tokenizer, self._processes, sampling, origin)

        async with slots:
            limits = Limits(
                tokens=settings.max_length,
                answer_tokens=settings.max_tokens,
                turns=settings.max_turns,
                seconds=float("inf"),
            )
            [row, *_] = await play(
                self._environment, index, [policy], limits, tries=settings.task_tries, created_at=time.time
            )
        aborted = row.finish_reason == FinishReason.ABORT
        return None if aborted and time.time() >= evaluation.expires else row

    async def _finish(
        self, evaluation: EvaluationRequest, rows: list[Trajectory], *, error: str = ""
    ) -> None:
        """Rows first, the result last: a reader of the result can read every row."""
        size = self._settings.segment_groups * self._settings.group_size
        for number, start in enumerate(range(0, len(rows), size)):
            data = segment.encode(rows[start : start + size], writer=self._worker, sequence=number)
            key = f"evaluations/{evaluation.id}/{self._worker}-{number}.parquet"
            await asyncio.to_thread(self._store.create, key, data)
        result = EvaluationResult(
            id=evaluation.id,
            version=evaluation.version,
            prompts=evaluation.prompts,
            worker=self._worker,
            time=time.time(),
            error=error,
            **summary(rows),
        )
        if not await asyncio.to_thread(self._store.create_json, result.key, result.to_json()):
            logger.warning("evaluation %s was answered by another worker meanwhile", evaluation.id)
        self._closed.add(evaluation.key)

    async def _keep(self, evaluation: EvaluationRequest) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 3)
            await asyncio.to_thread(self._claim, evaluation)

    def _claim(self, evaluation: EvaluationRequest) -> bool:
        """Takes or renews the request; False while another worker's lease is live."""
        found, generation = self._store.read_json_with_generation(evaluation.claim_key)
        if found is not None and found["worker"] != self._worker and found["lease_until"] > time.time():
            return False
        lease = {"worker": self._worker, "lease_until": time.time() + self._settings.lease_seconds}
        return self._store.swap_json(evaluation.claim_key, lease, generation)


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
    }
