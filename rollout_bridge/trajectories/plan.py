"""A plan is what one step trains on, written once to `plans/<step>.json` before the step, and never moved.

Trained = what the plans say. Every process reads the same plan; a restart reads it again instead of
choosing anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rollout_bridge.errors import ExpectedError
from rollout_bridge.store import Store
from rollout_bridge.trajectories.gate import fresh_mask
from rollout_bridge.trajectories.log import read_segment
from rollout_bridge.trajectories.schema import Trajectory
from rollout_bridge.trajectories.segment import SegmentError
from rollout_bridge.waiting import wait_for

PREFIX = "plans/"
FORMAT_VERSION = 1


class PlanError(ExpectedError):
    """A plan cannot be read, made or trained; the message names the plan and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RowRef:
    """Row `row` of the segment with key `segment`."""

    segment: str
    row: int
    trajectory_id: str

    @property
    def place(self) -> tuple[str, int]:
        return (self.segment, self.row)

    @property
    def group_id(self) -> str:
        return self.trajectory_id.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class PlanRow(RowRef):
    """One use of a trajectory in the step.

    slot: 0, or the number of the duplicate that restores its group's size.
    tokens: all of them; trainable_tokens: those left in the loss after stale ones are masked.
    version_counts: (version, trainable tokens of it), stale ones included.
    """

    slot: int
    advantage: float
    reward: float
    tokens: int
    trainable_tokens: int
    version_counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Step `step`; tokens more than `max_lag` optimizer steps behind the weights it trains are masked.

    version: the newest when it was made, published or being written.
    lags: (version, optimizer steps from its weights to those of this step), of each version in `rows`.
    rows: in the order they were drawn. drops: what this plan rules out for good, by reason.
    quarantined: bad segments known when it was made, with what is wrong. segment_rows: rows of every segment
        named.
    cursor: length bin the next plan draws from first.
    settled: sums over the valid trajectories that the plan trains or drops, copies left out: "trajectories",
        "truncated", "reward", and "reward/<component>".
    """

    step: int
    version: int
    max_lag: int
    cursor: int
    rows: tuple[PlanRow, ...]
    drops: Mapping[str, tuple[RowRef, ...]] = field(default_factory=dict)
    quarantined: Mapping[str, str] = field(default_factory=dict)
    segment_rows: Mapping[str, int] = field(default_factory=dict)
    lags: tuple[tuple[int, int], ...] = ()
    settled: Mapping[str, float] = field(default_factory=dict)

    def lag(self, version: int) -> int:
        """Of a token of `version`, in optimizer steps; of a version not in `lags`, one step a version."""
        return dict(self.lags).get(version, self.version - version)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def trainable_tokens(self) -> int:
        return sum(row.trainable_tokens for row in self.rows)

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal plans are equal bytes."""
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "step": self.step,
                "version": self.version,
                "max_lag": self.max_lag,
                "cursor": self.cursor,
                "rows": [asdict(row) for row in self.rows],
                "drops": {reason: [asdict(row) for row in rows] for reason, rows in self.drops.items()},
                "quarantined": dict(self.quarantined),
                "segment_rows": dict(self.segment_rows),
                "lags": self.lags,
                "settled": dict(self.settled),
            },
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> Plan:
        """Raises `PlanError` if `data` is not the plan that `key` must hold."""
        try:
            value: dict[str, Any] = json.loads(data)
            format_version = value.pop("format_version")
            plan = cls(
                **{
                    **value,
                    "rows": tuple(_row(row) for row in value["rows"]),
                    "drops": {
                        reason: tuple(RowRef(**row) for row in rows)
                        for reason, rows in value["drops"].items()
                    },
                    "lags": tuple((version, lag) for version, lag in value.get("lags", ())),
                }
            )
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise PlanError(
                f"{key} is not a plan: {type(error).__name__}: {error}; {_remedy(key)}"
            ) from error
        if format_version != FORMAT_VERSION or plan_key(plan.step) != key:
            raise PlanError(
                f"{key} holds step {plan.step} in format {format_version}, expected format {FORMAT_VERSION} "
                f"and the step its key says; {_remedy(key)}"
            )
        return plan


def plan_key(step: int) -> str:
    return f"{PREFIX}{step:08d}.json"


def plan_steps(store: Store) -> list[int]:
    """Steps that have a plan, ascending. Other keys below `plans/` are not ours."""
    return sorted(step for key in store.list(PREFIX) if (step := _step(key)) is not None)


def read_plan(store: Store, step: int) -> Plan | None:
    """The plan of `step`, None if there is none yet. Raises `PlanError`."""
    key = plan_key(step)
    data = store.read(key)
    return None if data is None else Plan.from_bytes(data, key=key)


def create_plan(store: Store, plan: Plan) -> bool:
    """Writes the plan; False if the step has one already, which then stands."""
    return store.create(plan_key(plan.step), plan.to_bytes())


def discard_plans_after(store: Store, step: int) -> list[int]:
    """Deletes the plans of all steps after `step`, the way out of a plan that cannot be trained.

    Their trajectories can be planned again. Newest first, so that an interruption leaves no gap. Returns the
    steps discarded, ascending. Only while no trainer runs.
    """
    discarded = [found for found in plan_steps(store) if found > step]
    for found in reversed(discarded):
        store.delete(plan_key(found))
    return discarded


def wait_for_plan(
    store: Store, step: int, *, timeout: float, poll: float, sleep: Callable[[float], object]
) -> Plan:
    """The plan of `step`, once process 0 has made it. Raises `PlanError` after `timeout` seconds."""
    return wait_for(
        lambda: read_plan(store, step),
        f"{plan_key(step)} in {store.url}: process 0 makes it before the step. Look at its log, and whether "
        "rollout workers deliver trajectories",
        timeout=timeout,
        poll=poll,
        error=PlanError,
        sleep=sleep,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One use of a trajectory: its advantage (the same for every token) and mask, bool [T]: trainable and
    fresh.
    """

    trajectory: Trajectory
    advantage: float
    mask: np.ndarray


def load_rows(store: Store, plan: Plan, cache: dict[str, list[Trajectory]]) -> list[Row]:
    """The plan's rows with their trajectories, in the plan's order, the same in every process.

    cache: segments by key that need no reading again; left with the segments of this plan.
    Raises `PlanError` if a segment is gone, bad, or does not hold what the plan says.
    """
    needed = {row.segment for row in plan.rows}
    for key in cache.keys() - needed:
        del cache[key]
    for key in sorted(needed - cache.keys()):
        try:
            cache[key] = read_segment(store, key)
        except SegmentError as error:
            raise PlanError(
                f"{plan_key(plan.step)} trains on {key}: {error}. {_way_out(plan.step)}"
            ) from error
    loaded = []
    for row in plan.rows:
        rows = cache[row.segment]
        found = rows[row.row].trajectory_id if row.row < len(rows) else None
        if found != row.trajectory_id:
            raise PlanError(
                f"{plan_key(plan.step)} expects {row.trajectory_id} at row {row.row} of "
                f"{row.segment}, which holds "
                f"{found}. {_way_out(plan.step)}"
            )
        trajectory = rows[row.row]
        mask = fresh_mask(trajectory.versions, trajectory.trainable, lag=plan.lag, max_lag=plan.max_lag)
        loaded.append(Row(trajectory=trajectory, advantage=row.advantage, mask=mask))
    return loaded


def _way_out(step: int) -> str:
    return f"Restore the segment, or restart with --discard-plans-after {step - 1}"


def _remedy(key: str) -> str:
    step = _step(key)
    restart = "" if step is None else f", or restart with --discard-plans-after {step - 1}"
    return f"restore it{restart}"


def _step(key: str) -> int | None:
    """The step whose plan has this key, None for any other key."""
    stem = key.removeprefix(PREFIX).removesuffix(".json")
    return int(stem) if stem.isdecimal() and plan_key(int(stem)) == key else None


def _row(value: dict[str, Any]) -> PlanRow:
    return PlanRow(**{**value, "version_counts": tuple((v, n) for v, n in value["version_counts"])})
