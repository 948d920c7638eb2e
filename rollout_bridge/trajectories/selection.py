"""What a step trains on: a pure function of what has arrived, the version and the state.

In order: one copy of each group; the environment-failure filter and group recovery; the group-mean baseline
over the valid members; the freshness gate; a draw that is even over length bins, oldest first. A trajectory
is drawn once in a run (its recovery duplicates go into the same step) or dropped once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollout_bridge.trajectories.gate import Gate, fresh_tokens, passes
from rollout_bridge.trajectories.groups import VALID, Boundary, group_advantages, recovery_slots
from rollout_bridge.trajectories.log import TrajectoryRef
from rollout_bridge.trajectories.plan import Plan, PlanRow, RowRef
from rollout_bridge.trajectories.sampler import LENGTH_BIN_EDGES, draw_order


@dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """How a step is chosen.

    target_trajectories: slots a step has, exactly; or target_tokens: most tokens (prompts included) of a
        step, which is full when the next one drawn no longer fits. One of the two.
    min_valid_fraction, boundary: smallest part of a group that must be valid for the rest to be used.
    drop_no_signal: drop groups whose rewards are all equal (their advantages are 0) instead of training on
        them.
    routed_experts: (MoE layers, k) that replayed experts must have; a trajectory with others is dropped, one
        without any is not. None: nothing is replayed.
    divide_by_std: GRPO's original normalisation instead of the plain group-mean baseline.
    """

    target_trajectories: int | None = None
    target_tokens: int | None = None
    gate: Gate = field(default_factory=Gate)
    min_valid_fraction: float = 0.5
    boundary: Boundary = Boundary.INCLUSIVE
    length_bin_edges: tuple[int, ...] = LENGTH_BIN_EDGES
    routed_experts: tuple[int, int] | None = None
    drop_no_signal: bool = False
    divide_by_std: bool = False

    def __post_init__(self) -> None:
        targets = [t for t in (self.target_trajectories, self.target_tokens) if t is not None]
        if len(targets) != 1 or targets[0] < 1:
            raise ValueError(
                f"trajectories: target_trajectories is {self.target_trajectories} and target_tokens is "
                f"{self.target_tokens}; set exactly one of them, to at least 1"
            )
        if not 0 <= self.min_valid_fraction <= 1:
            raise ValueError(f"trajectories.min_valid_fraction: {self.min_valid_fraction} is not in [0, 1]")
        if list(self.length_bin_edges) != sorted(set(self.length_bin_edges)):
            raise ValueError(f"trajectories.length_bin_edges: {self.length_bin_edges} must ascend strictly")


@dataclass
class SelectionState:
    """What the plans so far have settled; rebuilt from them on a restart.

    settled: places (segment, row) trained on or dropped. copies: the segment whose copy of a group counts.
    """

    cursor: int = 0
    settled: set[tuple[str, int]] = field(default_factory=set)
    copies: dict[str, str] = field(default_factory=dict)

    def record(self, plan: Plan) -> None:
        self.cursor = plan.cursor
        for row in plan.rows:
            self.settled.add(row.place)
            self.copies[row.group_id] = row.segment
        for reason, rows in plan.drops.items():
            for row in rows:
                self.settled.add(row.place)
                if reason != "duplicate":
                    self.copies[row.group_id] = row.segment


@dataclass(frozen=True, kw_only=True)
class Selection:
    """plan: None if too little has arrived. amount, target: of slots or tokens, as the settings count.

    live_groups: groups with a trajectory that may be drawn, in this plan or a later one.
    drops: what would be dropped now, by reason (recorded only when a plan is made).
    """

    plan: Plan | None
    amount: int
    target: int
    live_groups: frozenset[str]
    drops: Mapping[str, tuple[RowRef, ...]]


@dataclass(frozen=True)
class _Candidate:
    ref: TrajectoryRef
    slots: int
    advantage: float

    @property
    def tokens(self) -> int:
        return self.ref.tokens

    @property
    def age_key(self) -> tuple[float | int | str, ...]:
        return self.ref.age_key


def select(
    refs: Iterable[TrajectoryRef],
    *,
    step: int,
    version: int,
    state: SelectionState,
    settings: SelectionSettings,
    segment_rows: Mapping[str, int] | None = None,
    quarantined: Mapping[str, str] | None = None,
) -> Selection:
    """Chooses the plan of `step` at trainer version `version`. Changes nothing.

    refs: everything that arrived and is not settled, with the settled members of groups that are settled in
        part; in any order. segment_rows, quarantined: copied into the plan.
    """
    candidates, drops = _sort_out(refs, version=version, state=state, settings=settings)
    drawn, amount, full, cursor = _draw(candidates, settings=settings, cursor=state.cursor)
    plan = None
    if full:
        rows = tuple(
            _plan_row(c, slot, version, settings.gate) for c, slots in drawn for slot in range(slots)
        )
        named = {row.segment for row in rows} | {row.segment for dropped in drops.values() for row in dropped}
        plan = Plan(
            step=step,
            version=version,
            max_lag=settings.gate.max_lag,
            cursor=cursor,
            rows=rows,
            drops=drops,
            quarantined=dict(quarantined or {}),
            segment_rows={key: rows for key, rows in (segment_rows or {}).items() if key in named},
        )
    return Selection(
        plan=plan,
        amount=amount,
        target=settings.target_trajectories or settings.target_tokens or 0,
        live_groups=frozenset(c.ref.group_id for c in candidates),
        drops=drops,
    )


def _sort_out(
    refs: Iterable[TrajectoryRef], *, version: int, state: SelectionState, settings: SelectionSettings
) -> tuple[list[_Candidate], dict[str, tuple[RowRef, ...]]]:
    """Splits unsettled trajectories into those that may be drawn and those dropped, by reason."""
    copies: dict[str, dict[str, list[TrajectoryRef]]] = defaultdict(lambda: defaultdict(list))
    for ref in refs:
        copies[ref.group_id][ref.segment].append(ref)
    candidates: list[_Candidate] = []
    drops: dict[str, list[TrajectoryRef]] = defaultdict(list)
    for group, by_segment in copies.items():
        chosen = state.copies.get(group) or min(
            by_segment, key=lambda key: (min(ref.created_at for ref in by_segment[key]), key)
        )
        for segment, members in by_segment.items():
            members.sort(key=lambda ref: ref.member)
            if segment == chosen:
                found, dropped = _judge_group(members, version=version, settings=settings)
                candidates.extend(c for c in found if (c.ref.segment, c.ref.row) not in state.settled)
            else:
                dropped = [("duplicate", ref) for ref in members]
            for reason, ref in dropped:
                if (ref.segment, ref.row) not in state.settled:
                    drops[reason].append(ref)
    return candidates, {
        reason: tuple(
            RowRef(segment=ref.segment, row=ref.row, trajectory_id=ref.trajectory_id)
            for ref in sorted(dropped, key=lambda ref: (ref.segment, ref.row))
        )
        for reason, dropped in sorted(drops.items())
    }


def _judge_group(
    members: list[TrajectoryRef], *, version: int, settings: SelectionSettings
) -> tuple[list[_Candidate], list[tuple[str, TrajectoryRef]]]:
    valid = [ref for ref in members if ref.status in VALID]
    dropped = [("environment_failure", ref) for ref in members if ref.status not in VALID]
    slots = recovery_slots(
        [ref.status for ref in members],
        min_valid_fraction=settings.min_valid_fraction,
        boundary=settings.boundary,
    )
    if slots is None:
        return [], dropped + [("group_discarded", ref) for ref in valid]
    rewards = [ref.reward for ref in valid]
    if settings.drop_no_signal and min(rewards) == max(rewards):
        return [], dropped + [("no_signal", ref) for ref in valid]
    slots_of = {ref.member: n for ref, n in zip(members, slots, strict=True)}
    candidates = []
    for ref, advantage in zip(
        valid, group_advantages(rewards, divide_by_std=settings.divide_by_std), strict=True
    ):
        if not passes(ref.version_counts, version=version, gate=settings.gate):
            dropped.append(("stale", ref))
        elif settings.target_tokens is not None and ref.tokens > settings.target_tokens:
            dropped.append(("too_long", ref))
        elif None not in (settings.routed_experts, ref.routed_experts) and (
            ref.routed_experts != settings.routed_experts
        ):
            dropped.append(("other_experts", ref))
        else:
            candidates.append(_Candidate(ref, slots_of[ref.member], advantage))
    return candidates, dropped


def _draw(
    candidates: list[_Candidate], *, settings: SelectionSettings, cursor: int
) -> tuple[list[tuple[_Candidate, int]], int, bool, int]:
    """(drawn candidates with their slots, amount drawn, whether the step is full, next cursor).

    Recovery duplicates that no longer fit are left out; the trajectory itself is drawn only if it fits.
    """
    drawn: list[tuple[_Candidate, int]] = []
    amount = 0
    for candidate, following in draw_order(candidates, edges=settings.length_bin_edges, cursor=cursor):
        cost = 1 if settings.target_tokens is None else candidate.tokens
        target = settings.target_trajectories or settings.target_tokens or 0
        slots = min(candidate.slots, (target - amount) // cost)
        if slots == 0:
            return drawn, amount, True, cursor
        drawn.append((candidate, slots))
        amount += slots * cost
        cursor = following
        if amount == target:
            return drawn, amount, True, cursor
    return drawn, amount, False, cursor


def _plan_row(candidate: _Candidate, slot: int, version: int, gate: Gate) -> PlanRow:
    ref = candidate.ref
    return PlanRow(
        segment=ref.segment,
        row=ref.row,
        trajectory_id=ref.trajectory_id,
        slot=slot,
        advantage=candidate.advantage,
        reward=ref.reward,
        tokens=ref.tokens,
        trainable_tokens=fresh_tokens(ref.version_counts, version=version, max_lag=gate.max_lag),
        version_counts=ref.version_counts,
    )
