"""Where every trajectory went, from the segments and the plans alone.

written == trained + pending + sum(dropped), each counted on its own, so that a trajectory lost or used
twice shows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rollout_bridge.store import Store
from rollout_bridge.trajectories import log, segment
from rollout_bridge.trajectories.gate import fresh_tokens
from rollout_bridge.trajectories.log import TrajectoryRef
from rollout_bridge.trajectories.plan import Plan, plan_steps, read_plan


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Trajectories unless a name says otherwise.

    written: rows in the log, those of quarantined segments included where their footer can be read.
    trained: rows that plans train on, each once; slots: uses of them, recovery duplicates included.
    pending: rows no plan has trained or dropped yet. dropped: by reason, "quarantined" among them.
    twice: rows in more than one plan, or both trained and dropped (a broken invariant; 0 in a sound run).
    missing: rows that plans name and the log no longer holds.
    lag_mean, lag_max: versions, over the tokens trained on, each slot counted (0 if none).
    spans_crossing: rows whose tokens come from more than one version.
    generated_tokens, trained_tokens: tokens the policy sampled, and tokens in the loss with their slots.
    """

    written: int
    trained: int
    slots: int
    pending: int
    dropped: dict[str, int]
    twice: int
    missing: int
    groups: int
    segments: int
    quarantined_segments: int
    plans: int
    lag_mean: float
    lag_max: int
    spans_crossing: int
    generated_tokens: int
    trained_tokens: int

    @property
    def adds_up(self) -> bool:
        return self.written == self.trained + self.pending + sum(self.dropped.values()) and not self.twice


def count(store: Store) -> Counts:
    """Reads the whole log and every plan. Raises `PlanError` for a plan that cannot be read."""
    # Plans first: in a run that goes on, every row they name is in the log that is read after them.
    plans = [plan for plan in (read_plan(store, step) for step in plan_steps(store)) if plan is not None]
    refs, quarantined = _read_log(store)
    trained: Counter[tuple[str, int]] = Counter()
    reasons: dict[tuple[str, int], str] = {}
    twice: set[tuple[str, int]] = set()
    for plan in plans:
        trained.update({row.place for row in plan.rows})
        for reason, rows in plan.drops.items():
            twice.update(row.place for row in rows if row.place in reasons)
            reasons.update({row.place: reason for row in rows})
    twice.update(place for place, uses in trained.items() if uses > 1 or place in reasons)
    written = {(ref.segment, ref.row): ref for ref in refs}
    dropped = Counter(reasons[place] for place in written if place in reasons)
    if quarantined:
        dropped["quarantined"] = sum(quarantined.values())
    lags = _lags(plans, written)
    tokens = sum(lags.values())
    return Counts(
        written=len(written) + sum(quarantined.values()),
        trained=sum(place in trained for place in written),
        slots=sum(len(plan.rows) for plan in plans),
        pending=sum(place not in trained and place not in reasons for place in written),
        dropped=dict(sorted(dropped.items())),
        twice=len(twice),
        missing=len((trained.keys() | reasons.keys()) - written.keys()),
        groups=len({ref.group_id for ref in refs}),
        segments=len({ref.segment for ref in refs}) + len(quarantined),
        quarantined_segments=len(quarantined),
        plans=len(plans),
        lag_mean=sum(lag * n for lag, n in lags.items()) / tokens if tokens else 0.0,
        lag_max=max(lags, default=0),
        spans_crossing=sum(len(ref.version_counts) > 1 for ref in refs),
        generated_tokens=sum(ref.trainable_tokens for ref in refs),
        trained_tokens=tokens,
    )


def _read_log(store: Store) -> tuple[list[TrajectoryRef], dict[str, int]]:
    """Every good row, and the rows of bad segments by key."""
    reader = log.LogReader(store)
    refs = reader.poll()
    return refs, {key: segment.row_count(store.read(key) or b"") for key in reader.quarantined}


def _lags(plans: list[Plan], written: dict[tuple[str, int], TrajectoryRef]) -> Counter[int]:
    """Tokens trained on by lag, from the versions in the segments (not what the plans repeat of them)."""
    lags: Counter[int] = Counter()
    for plan in plans:
        for row in plan.rows:
            ref = written.get(row.place)
            for version, tokens in ref.version_counts if ref is not None else ():
                if fresh_tokens([(version, tokens)], lag=plan.lag, max_lag=plan.max_lag):
                    lags[max(0, plan.lag(version))] += tokens
    return lags
