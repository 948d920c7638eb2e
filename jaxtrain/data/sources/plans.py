"""Batches of planned trajectories. Step k+1 is planned, read and packed while step k computes.

Process 0 plans; every process reads the plans and packs the same batch. Nothing collective runs here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from jaxtrain.data.packing import Document, pack
from jaxtrain.data.sources.base import BatchShape, BatchSpec, Interrupted, Packed
from rollout_bridge.store import Store
from rollout_bridge.trajectories.dataset import PlanDataset, PlannedStep, Row
from rollout_bridge.trajectories.planner import Planner
from rollout_bridge.trajectories.selection import Advantage

FILL = 0.95  # of a batch's positions that a plan aims at; best-fit packing loses less than the rest
POLL_SECONDS = 0.1
PLAN_COLUMNS = frozenset({"behavior_logprobs", "advantages", "temperature", "routed_experts"})


class TrainerClock:
    """The step that the trainer is at: set by the training loop, waited for by the thread that plans."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._step = -1

    def set(self, step: int) -> None:
        with self._moved:
            self._step = step
            self._moved.notify_all()

    def wait_for(self, step: int, interrupted: Callable[[], bool]) -> None:
        """Returns once the trainer is at `step` or later. Raises `Interrupted`."""
        with self._moved:
            while self._step < step:
                if interrupted():
                    raise Interrupted
                self._moved.wait(POLL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How plans come to be.

    open_planner: in process 0, given the sleep that its waits use; None in the others. clock, ahead: step k is
    planned once the trainer is at step k - ahead. version_at: policy version that the trainer's weights will
    have at a step. timeout_seconds: of the wait for trajectories.
    """

    store: Store
    open_planner: Callable[[Callable[[float], None]], Planner] | None
    advantage: Advantage
    clock: TrainerClock
    ahead: int
    version_at: Callable[[int], int]
    timeout_seconds: float


class PlannedBatches(grain.IterDataset[Packed]):
    """State: {"step": the RL step served next, "tokens": valid tokens handed out}."""

    def __init__(self, planning: Planning, spec: BatchSpec) -> None:
        super().__init__()
        self.planning, self.spec = planning, spec

    def __iter__(self) -> _Iterator:
        return _Iterator(self.planning, self.spec)


class _Iterator(grain.DatasetIterator[Packed]):
    def __init__(self, planning: Planning, spec: BatchSpec) -> None:
        super().__init__()
        self._planning, self._spec = planning, spec
        self._step = self._tokens = 0
        self._planner = planning.open_planner(self._sleep) if planning.open_planner is not None else None
        self._plans = iter(
            PlanDataset(
                planning.store,
                timeout_seconds=planning.timeout_seconds,
                poll_seconds=POLL_SECONDS,
                sleep=self._sleep,
            )
        )

    def __next__(self) -> Packed:
        if self._step >= self._spec.steps:
            raise StopIteration
        planning, shape = self._planning, self._spec.shape_at(self._tokens)
        planning.clock.wait_for(self._step - planning.ahead, self._spec.interrupted)
        if self._planner is not None:
            self._planner.plan(
                self._step,
                planning.version_at(self._step),
                timeout=planning.timeout_seconds,
                target_tokens=int(FILL * shape.positions),
            )
        planned = next(self._plans)
        packed = self._packed(planned, shape)
        self._step += 1
        self._tokens += packed.batch.valid_tokens()
        return packed

    def get_state(self) -> dict[str, Any]:
        return {"step": self._step, "tokens": self._tokens}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step, self._tokens = int(state["step"]), int(state["tokens"])
        self._plans.set_state({"step": self._step})

    def _packed(self, planned: PlannedStep, shape: BatchShape) -> Packed:
        batch = pack(
            [document(row, self._planning.advantage) for row in planned.rows],
            rows=shape.rows,
            sequence_length=shape.sequence_length,
            columns=self._spec.columns,
        )
        return Packed(batch, trajectory_metrics(planned))

    def _sleep(self, seconds: float) -> None:
        if self._spec.interrupted():
            raise Interrupted
        time.sleep(seconds)


def document(row: Row, advantage: Advantage) -> Document:
    """What a planned row contributes: its trainable, fresh tokens."""
    trajectory = row.trajectory
    columns: dict[str, np.ndarray | float] = {
        "behavior_logprobs": trajectory.behavior_logprobs,
        "advantages": advantage.of_tokens(trajectory, row.advantage),
        "temperature": trajectory.temperature,
    }
    if trajectory.routed_experts is not None:
        columns["routed_experts"] = trajectory.routed_experts
    return Document(tokens=trajectory.token_ids, loss_weights=row.mask.astype(np.float32), columns=columns)


def trajectory_metrics(planned: PlannedStep) -> dict[str, float]:
    """Reward, and lag in versions of the tokens trained on."""
    lags = np.concatenate([planned.version - row.trajectory.versions[row.mask] for row in planned.rows])
    trainable = sum(int(row.trajectory.trainable.sum()) for row in planned.rows)
    return {
        "reward_mean": float(np.mean([row.trajectory.reward for row in planned.rows])),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_max": int(lags.max()) if lags.size else 0,
        "masked_fraction": 1.0 - lags.size / max(trainable, 1),
        "trajectories": len(planned.rows),
        "mean_length": float(np.mean([len(row.trajectory.token_ids) for row in planned.rows])),
        "plan_version": planned.version,
    }
