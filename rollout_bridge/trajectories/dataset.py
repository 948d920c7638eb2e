"""The plans as a Grain dataset: element k is what step k trains on, and the iterator's state is the step.

The planner in process 0 makes the plans; this waits for them. Nothing is chosen and nothing collective runs
here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from rollout_bridge.store import Store
from rollout_bridge.trajectories.gate import fresh_mask
from rollout_bridge.trajectories.plan import Plan, PlanError, load_rows, plan_key, read_plan
from rollout_bridge.trajectories.schema import Trajectory
from rollout_bridge.waiting import wait_for


@dataclass(frozen=True, kw_only=True)
class Row:
    """One use of a trajectory: its advantage (the same for every token) and mask, bool [T]: trainable and
    fresh.
    """

    trajectory: Trajectory
    slot: int
    advantage: float
    mask: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The rows of one step in the plan's order, the same in every process."""

    step: int
    version: int
    rows: tuple[Row, ...]
    plan: Plan


class PlanDataset(grain.IterDataset[PlannedStep]):
    """Plans from step `first_step` on.

    timeout_seconds: how long the iterator waits for the next plan before it raises `PlanError`.
    poll_seconds: between looks. clock, sleep: as in `time`.
    """

    def __init__(
        self,
        store: Store,
        *,
        first_step: int = 0,
        timeout_seconds: float = 1800.0,
        poll_seconds: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self.store = store
        self.first_step = first_step
        self.timeout_seconds = timeout_seconds
        self.poll_seconds = poll_seconds
        self.clock = clock
        self.sleep = sleep

    def __iter__(self) -> PlanIterator:
        return PlanIterator(self)


class PlanIterator(grain.DatasetIterator[PlannedStep]):
    """State: {"step": the step served next}. A step whose plan never came is not skipped: the next call
    waits again.
    """

    def __init__(self, dataset: PlanDataset) -> None:
        super().__init__()
        self._dataset = dataset
        self._step = dataset.first_step
        self._segments: dict[str, list[Trajectory]] = {}

    def __next__(self) -> PlannedStep:
        plan = self._wait()
        rows = tuple(
            Row(
                trajectory=trajectory,
                slot=row.slot,
                advantage=row.advantage,
                mask=fresh_mask(
                    trajectory.versions, trajectory.trainable, version=plan.version, max_lag=plan.max_lag
                ),
            )
            for row, trajectory in load_rows(self._dataset.store, plan, self._segments)
        )
        self._step += 1
        return PlannedStep(step=plan.step, version=plan.version, rows=rows, plan=plan)

    def get_state(self) -> dict[str, Any]:
        return {"step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step = int(state["step"])

    def _wait(self) -> Plan:
        dataset = self._dataset
        return wait_for(
            lambda: read_plan(dataset.store, self._step),
            f"{plan_key(self._step)} in {dataset.store.url}: process 0 makes it before the step. Look at its "
            "log, and whether rollout workers deliver trajectories",
            timeout=dataset.timeout_seconds,
            poll=dataset.poll_seconds,
            error=PlanError,
            clock=dataset.clock,
            sleep=dataset.sleep,
        )
