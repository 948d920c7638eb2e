"""What a step trains on: a pure function of what has arrived, the version and the state.

In order: one copy of each group; the environment-failure filter and group recovery; the advantages of the
valid members; the configured filters; the freshness gate; a draw that is even over length bins, oldest first,
of what packs into the step's rows.
A trajectory is drawn once in a run (its recovery duplicates go into the same step) or dropped once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rollout_bridge.trajectories.gate import Gate, Lag, fresh_tokens, passes
from rollout_bridge.trajectories.groups import VALID, Boundary, recovery_slots
from rollout_bridge.trajectories.log import TrajectoryRef
from rollout_bridge.trajectories.packing import Room, best_fit, positions
from rollout_bridge.trajectories.plan import Plan, PlanError, PlanRow, RowRef
from rollout_bridge.trajectories.sampler import draw_order
from rollout_bridge.trajectories.schema import Status, Trajectory

RESERVED_REASONS = frozenset(
    [
        "ahead_of_trainer",
        "duplicate",
        "environment_failure",
        "group_discarded",
        "other_experts",
        "quarantined",
        "stale",
        "too_long",
    ]
)


class Advantage(Protocol):
    """A frozen dataclass of its options. A new advantage is a new file."""

    def of_group(self, members: Sequence[TrajectoryRef]) -> Sequence[float]:
        """One number for each valid member of a group, which the plan records."""
        ...

    def of_tokens(self, trajectory: Trajectory, advantage: float) -> float | np.ndarray:
        """From the recorded number: one for the whole trajectory, or float32 [T], one for each token."""
        ...


class Filter(Protocol):
    """A frozen dataclass of its options that drops valid members of groups. A new filter is a new file."""

    @property
    def reason(self) -> str:
        """Under which the plan records what it drops."""
        ...

    def keep(self, members: Sequence[TrajectoryRef], *, version: int) -> Sequence[bool]:
        """Of each valid member of a group, at the trainer's version. What is refused once is dropped."""
        ...


@dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """How a step is chosen.

    rows, sequence_length: of a step, which is full when nothing that has arrived fits any more.
    min_valid_fraction, boundary: smallest part of a group that must be valid for the rest to be used.
    length_bin_edges: upper edges in tokens.
    routed_experts: (MoE layers, k) that replayed experts must have; a trajectory with others is dropped, one
        without any is not. None: nothing is replayed.
    advantage: over the valid members of a group, those that filters drop included.
    filters: in their order, each on what those before it have left.
    """

    rows: int
    sequence_length: int
    gate: Gate
    min_valid_fraction: float
    boundary: Boundary
    length_bin_edges: tuple[int, ...]
    routed_experts: tuple[int, int] | None
    advantage: Advantage
    filters: tuple[Filter, ...]

    def __post_init__(self) -> None:
        if taken := [rule.reason for rule in self.filters if rule.reason in RESERVED_REASONS]:
            raise PlanError(f"trajectories.filters: {taken} are reasons of the plans' own; name another")
        if self.rows < 1 or self.sequence_length < 1:
            raise ValueError(
                f"trajectories: rows {self.rows} and sequence_length {self.sequence_length} must be at "
                "least 1"
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
    """plan: None if too little has arrived. amount, target: positions drawn, and those of a step.

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
    lag: Lag | None = None,
    segment_rows: Mapping[str, int] | None = None,
    quarantined: Mapping[str, str] | None = None,
) -> Selection:
    """Chooses the plan of `step` at trainer version `version`. Changes nothing.

    refs: everything that arrived and is not settled, with the settled members of groups that are settled in
        part; in any order. segment_rows, quarantined: copied into the plan.
    lag: of a version at this step, by default one for each version.
    """
    lag = lag or (lambda older: version - older)
    refs = list(refs)
    candidates, drops = _sort_out(refs, version=version, lag=lag, state=state, settings=settings)
    drawn = _draw(candidates, settings=settings, cursor=state.cursor)
    plan = None
    if drawn.full:
        rows = tuple(
            _plan_row(c, slot, lag, settings.gate) for c, slots in drawn.rows for slot in range(slots)
        )
        named = {row.segment for row in rows} | {row.segment for dropped in drops.values() for row in dropped}
        plan = Plan(
            step=step,
            version=version,
            max_lag=settings.gate.max_lag,
            cursor=drawn.cursor,
            rows=rows,
            lags=tuple((v, lag(v)) for v in sorted({v for row in rows for v, _ in row.version_counts})),
            drops=drops,
            quarantined=dict(quarantined or {}),
            segment_rows={key: rows for key, rows in (segment_rows or {}).items() if key in named},
            settled=_settled(refs, rows, drops),
        )
    return Selection(
        plan=plan,
        amount=drawn.amount,
        target=settings.rows * settings.sequence_length,
        live_groups=frozenset(c.ref.group_id for c in candidates),
        drops=drops,
    )


def _sort_out(
    refs: Iterable[TrajectoryRef],
    *,
    version: int,
    lag: Lag,
    state: SelectionState,
    settings: SelectionSettings,
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
                found, dropped = _judge_group(members, version=version, lag=lag, settings=settings)
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


def _advantages(valid: list[TrajectoryRef], advantage: Advantage) -> dict[int, float]:
    """By member. Raises `PlanError` for values that are not one finite number each: a plan is JSON."""
    values = [float(value) for value in advantage.of_group(valid)]
    if len(values) != len(valid) or not all(map(math.isfinite, values)):
        raise PlanError(
            f"advantage {type(advantage).__name__} gives {values} for the {len(valid)} members of group "
            f"{valid[0].group_id if valid else '-'}; expected one finite number each"
        )
    return {ref.member: value for ref, value in zip(valid, values, strict=True)}


def _judge_group(
    members: list[TrajectoryRef], *, version: int, lag: Lag, settings: SelectionSettings
) -> tuple[list[_Candidate], list[tuple[str, TrajectoryRef]]]:
    newest = {ref.member: max((found for found, _ in ref.version_counts), default=0) for ref in members}
    if version + 1 in newest.values():
        return [], []  # published this moment, and not known here yet
    ahead = {member for member, found in newest.items() if found > version}  # no version that there is
    valid = [ref for ref in members if ref.status in VALID and ref.member not in ahead]
    dropped = [
        ("ahead_of_trainer" if ref.member in ahead else "environment_failure", ref)
        for ref in members
        if ref.status not in VALID or ref.member in ahead
    ]
    slots = recovery_slots(
        [Status.ENVIRONMENT_FAILURE if ref.member in ahead else ref.status for ref in members],
        min_valid_fraction=settings.min_valid_fraction,
        boundary=settings.boundary,
    )
    if slots is None:
        return [], dropped + [("group_discarded", ref) for ref in valid]
    slots_of = {ref.member: n for ref, n in zip(members, slots, strict=True)}
    advantages = _advantages(valid, settings.advantage)
    left = valid
    for rule in settings.filters:
        kept = rule.keep(left, version=version) if left else []
        if len(kept) != len(left):
            raise PlanError(f"filter {type(rule).__name__}: {len(kept)} answers for {len(left)} members")
        dropped += [(rule.reason, ref) for ref, keep in zip(left, kept, strict=True) if not keep]
        left = [ref for ref, keep in zip(left, kept, strict=True) if keep]
    candidates = []
    for ref in left:
        if not passes(ref.version_counts, lag=lag, gate=settings.gate):
            dropped.append(("stale", ref))
        elif positions(ref.tokens) > settings.sequence_length:
            dropped.append(("too_long", ref))
        elif None not in (settings.routed_experts, ref.routed_experts) and (
            ref.routed_experts != settings.routed_experts
        ):
            dropped.append(("other_experts", ref))
        else:
            candidates.append(_Candidate(ref, slots_of[ref.member], advantages[ref.member]))
    return candidates, dropped


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """rows: candidates with their slots, in the order drawn. full: something that arrived does not fit, or no
    position is left. cursor: of the next draw. missed: the first that did not fit.
    """

    rows: tuple[tuple[_Candidate, int], ...]
    amount: int
    full: bool
    cursor: int
    missed: _Candidate | None


def _draw(candidates: list[_Candidate], *, settings: SelectionSettings, cursor: int) -> _Drawn:
    """Draws in the sampler's order whatever fits.

    Where that leaves a tenth of the positions or more, the first that did not fit is drawn first instead, if
    more positions are filled then: short ones ahead of it would leave it no row.
    """
    order = list(draw_order(candidates, edges=settings.length_bin_edges, cursor=cursor))
    drawn = _fill(order, settings=settings, cursor=cursor)
    enough = 0.9 * settings.rows * settings.sequence_length
    if drawn.missed is None or drawn.amount >= enough:
        return drawn
    missed = drawn.missed
    turned = sorted(order, key=lambda item: item[0] is not missed)
    other = _fill(turned, settings=settings, cursor=cursor)
    return other if other.amount > drawn.amount else drawn


def _fill(order: list[tuple[_Candidate, int]], *, settings: SelectionSettings, cursor: int) -> _Drawn:
    """Takes candidates in `order`, each with the cursor after it, and leaves out those that do not fit.

    Recovery duplicates that no longer fit are left out too.
    """
    room = Room(settings.rows, settings.sequence_length)
    rows: list[tuple[_Candidate, int]] = []
    missed: _Candidate | None = None
    for candidate, following in order:
        length = positions(candidate.tokens)
        slots = 0
        while slots < candidate.slots and room.add(length):
            slots += 1
        if slots:
            rows.append((candidate, slots))
            cursor = following
        elif missed is None:
            missed = candidate
        if room.used == room.total:
            break
    while len(best_fit([positions(c.tokens) for c, n in rows for _ in range(n)], room.capacity)) > room.rows:
        # Rare: packed all at once they need a row more than one by one.
        missed, slots = rows.pop()
        rows += [(missed, slots - 1)] if slots > 1 else []
    return _Drawn(
        rows=tuple(rows),
        amount=sum(n * positions(c.tokens) for c, n in rows),
        full=missed is not None or room.used == room.total,
        cursor=cursor,
        missed=missed,
    )


def _settled(
    refs: Sequence[TrajectoryRef], rows: Sequence[PlanRow], drops: Mapping[str, tuple[RowRef, ...]]
) -> Mapping[str, float]:
    """Sums over the valid trajectories that a plan trains or drops, so each counts once in a run."""
    places = {row.place for row in rows}
    for reason, dropped in drops.items():
        places |= set() if reason in ("duplicate", "ahead_of_trainer") else {row.place for row in dropped}
    sums: dict[str, float] = defaultdict(float)
    for ref in refs:
        if (ref.segment, ref.row) in places and ref.status in VALID:
            sums["trajectories"] += 1
            sums["truncated"] += ref.truncated
            sums["reward"] += ref.reward
            for name, value in ref.rewards:
                sums[f"reward/{name}"] += value
    return dict(sums)


def _plan_row(candidate: _Candidate, slot: int, lag: Lag, gate: Gate) -> PlanRow:
    ref = candidate.ref
    return PlanRow(
        segment=ref.segment,
        row=ref.row,
        trajectory_id=ref.trajectory_id,
        slot=slot,
        advantage=candidate.advantage,
        reward=ref.reward,
        tokens=ref.tokens,
        trainable_tokens=fresh_tokens(ref.version_counts, lag=lag, max_lag=gate.max_lag),
        version_counts=ref.version_counts,
    )
