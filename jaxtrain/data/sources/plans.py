"""Batches of planned trajectories. Step k+1 is planned, read and packed while step k computes.

Process 0 plans; every process reads the plans and packs the same batch. Nothing collective runs here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grain
import numpy as np

from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.packing import Document, pack
from jaxtrain.data.sources.base import BatchShape, BatchSpec, Packed
from rollout_bridge.store import Store
from rollout_bridge.trajectories.gate import Gate, lags_of
from rollout_bridge.trajectories.groups import Boundary
from rollout_bridge.trajectories.plan import (
    Plan,
    PlanError,
    Row,
    discard_plans_after,
    load_rows,
    wait_for_plan,
)
from rollout_bridge.trajectories.planner import POLL_SECONDS, Planner
from rollout_bridge.trajectories.schema import Trajectory
from rollout_bridge.trajectories.selection import Advantage, Filter, SelectionSettings
from rollout_bridge.waiting import Interrupted, sleep_unless, wait_for
from sharding import processes

log = logging.getLogger(__name__)

STEP_SECONDS = 24 * 3600.0  # of the longest step, its compilation and an evaluation included


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

        def sleep(seconds: float) -> None:
            if interrupted():
                raise Interrupted
            self._moved.wait(seconds)

        with self._moved:
            wait_for(
                lambda: True if self._step >= step else None,
                f"the trainer to come to step {step}: it is at {self._step}. See its log",
                timeout=STEP_SECONDS,
                poll=POLL_SECONDS,
                error=PlanError,
                sleep=sleep,
            )


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Settings and inputs of planning.

    replayed: (MoE layers, k) of the experts that engines send and the loss replays; None if it does not.
    version: the newest policy version. lag: of a version at an RL step, in optimizer steps. Called by the
        planning thread.
    """

    store: Store
    config: AsyncGrpoConfig
    advantage: Advantage
    filters: tuple[Filter, ...]
    replayed: tuple[int, int] | None
    clock: TrainerClock
    version: Callable[[], int]
    lag: Callable[[int, int], int]

    def planner(self, shape: BatchShape, sleep: Callable[[float], None]) -> Planner | None:
        """In process 0 only; workers may claim prompts from then on.

        shape: of the first step. sleep: called while it waits.
        """
        if processes.process_index() != 0:
            return None
        section = self.config.trajectories
        planner = Planner(
            self.store,
            SelectionSettings(
                rows=shape.microbatches * shape.rows,
                sequence_length=shape.sequence_length,
                gate=Gate(max_lag=section.max_lag, min_fresh_fraction=section.min_fresh_fraction),
                min_valid_fraction=section.min_valid_fraction,
                boundary=Boundary(section.boundary),
                length_bin_edges=length_bin_edges(self.config.batch.sequence_length, section.length_bins),
                routed_experts=self.replayed,
                advantage=self.advantage,
                filters=self.filters,
            ),
            outstanding_groups=self.config.rollouts.outstanding_groups,
            sleep=sleep,
        )
        planner.open_credits()
        return planner


def length_bin_edges(longest: int, bins: int) -> tuple[int, ...]:
    """Upper edges in tokens of `bins` equal parts of [0, longest). The published number is unknown."""
    return tuple(longest * part // bins for part in range(1, bins))


def discard_plans(store: Store, *, after: int, trained: int) -> None:
    """Deletes the plans of RL steps after `after`. trained: RL steps in the newest checkpoint.

    Raises `PlanError` if the checkpoint has already trained one of them.
    """
    if after < trained - 1:
        raise PlanError(
            f"--discard-plans-after {after}: the newest checkpoint has trained RL steps up to {trained - 1}; "
            f"move newer checkpoints away, or give {trained - 1} or more"
        )
    if processes.process_index() == 0:
        log.warning("discarded the plans of steps %s", discard_plans_after(store, after))


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
        self._timeout = planning.config.trajectories.wait_timeout_s
        # Tokens of the next version are not there yet: with no lag allowed nothing can be planned ahead.
        section = planning.config.trajectories
        self._ahead = min(section.plans_ahead, section.max_lag)
        self._sleep = sleep_unless(spec.interrupted)
        self._planner = planning.planner(spec.shape_at(0), self._sleep)
        self._segments: dict[str, list[Trajectory]] = {}

    def __next__(self) -> Packed:
        if self._step >= self._spec.steps:
            raise StopIteration
        planning, shape, step = self._planning, self._spec.shape_at(self._tokens), self._step
        planning.clock.wait_for(step - self._ahead, self._spec.interrupted)
        if self._planner is not None:
            self._planner.plan(
                step,
                planning.version,
                lag=lambda version: planning.lag(version, step),
                timeout=self._timeout,
                rows=shape.microbatches * shape.rows,
            )
        plan = wait_for_plan(
            planning.store, step, timeout=self._timeout, poll=POLL_SECONDS, sleep=self._sleep
        )
        packed = self._packed(plan, shape)
        self._step += 1
        self._tokens += packed.batch.valid_tokens()
        return packed

    def get_state(self) -> dict[str, Any]:
        return {"step": self._step, "tokens": self._tokens}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step, self._tokens = int(state["step"]), int(state["tokens"])

    def _packed(self, plan: Plan, shape: BatchShape) -> Packed:
        planning = self._planning
        loaded = load_rows(planning.store, plan, self._segments)
        batch = pack(
            [document(row, planning.advantage, planning.config.rl.average) for row in loaded],
            rows=shape.rows,
            sequence_length=shape.sequence_length,
            columns=self._spec.columns,
        )
        return Packed(batch, trajectory_metrics(plan, loaded))


def document(
    row: Row, advantage: Advantage, average: Literal["tokens", "trajectories"] = "tokens"
) -> Document:
    """The document of a planned row; its loss covers trainable, fresh tokens.

    average: what the loss is a mean over; of trajectories, the weights of each add up to 1.
    """
    trajectory = row.trajectory
    weights = row.mask.astype(np.float32)
    if average == "trajectories":
        weights /= max(weights.sum(), 1)
    columns: dict[str, np.ndarray | float] = {
        "behavior_logprobs": trajectory.behavior_logprobs,
        "advantages": advantage.of_tokens(trajectory, row.advantage),
        "temperature": trajectory.temperature,
    }
    if trajectory.routed_experts is not None:
        columns["routed_experts"] = trajectory.routed_experts
    return Document(tokens=trajectory.token_ids, loss_weights=weights, columns=columns)


def trajectory_metrics(plan: Plan, rows: Sequence[Row]) -> dict[str, float]:
    """Of a step. reward_mean, truncated_fraction and reward_<component>: means over every valid trajectory
    that the plan trains or drops, so over all that were made. reward_mean_trained: over the rows trained on,
    without the groups that have no contrast. Lag is in optimizer steps, of the tokens trained on.
    """
    lags = lags_of(np.concatenate([row.trajectory.versions[row.mask] for row in rows]), plan.lag)
    trainable = sum(int(row.trajectory.trainable.sum()) for row in rows)
    return {
        **_of_settled(plan),
        **{f"dropped_{reason}": len(dropped) for reason, dropped in plan.drops.items()},
        "quarantined_segments": len(plan.quarantined),
        "reward_mean_trained": float(np.mean([row.trajectory.reward for row in rows])),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_max": int(lags.max()) if lags.size else 0,
        "masked_fraction": 1.0 - lags.size / max(trainable, 1),
        "trajectories": len(rows),
        "mean_length": float(np.mean([len(row.trajectory.token_ids) for row in rows])),
        "plan_version": plan.version,
    }


def _of_settled(plan: Plan) -> dict[str, float]:
    sums = dict(plan.settled)
    if not (count := sums.pop("trajectories", 0)):
        return {}
    means = {
        "reward_mean": sums.pop("reward") / count,
        "truncated_fraction": sums.pop("truncated") / count,
        "settled": count,
    }
    return means | {name.replace("/", "_"): total / count for name, total in sorted(sums.items())}
