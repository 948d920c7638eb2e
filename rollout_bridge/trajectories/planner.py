"""Process 0 of the trainer: follows the log, makes each step's plan once, grants workers credits."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from rollout_bridge.control import Refusals
from rollout_bridge.store import Store
from rollout_bridge.trajectories.claims import grant, read_claims
from rollout_bridge.trajectories.gate import Lag
from rollout_bridge.trajectories.log import LogReader, TrajectoryRef, by_writer
from rollout_bridge.trajectories.plan import Plan, PlanError, create_plan, plan_key, plan_steps, read_plan
from rollout_bridge.trajectories.schema import group_id
from rollout_bridge.trajectories.selection import Selection, SelectionSettings, SelectionState, select
from rollout_bridge.waiting import wait_for

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between looks at the log: one listing, short beside a step


class PlanTimeoutError(PlanError):
    """Too little arrived in time to plan a step; the message says how much, and where to look."""


class Planner:
    """Makes plans. One per run, in process 0; it takes up whatever plans the store already holds.

    outstanding_groups: groups that workers may have claimed, or that wait in the log, at any one time (the
        back-pressure). More where all of them have arrived and do not fill a step.
    sleep: as in `time`, called between looks at the log.
    """

    def __init__(
        self,
        store: Store,
        settings: SelectionSettings,
        *,
        outstanding_groups: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if outstanding_groups < 1:
            raise ValueError(f"trajectories.outstanding_groups: {outstanding_groups} must be at least 1")
        self._store = store
        self._settings = settings
        self._outstanding = outstanding_groups
        self._sleep = sleep
        self._state = SelectionState()
        self._plans: dict[int, int] = {}  # step -> version
        self._groups: dict[str, list[TrajectoryRef]] = {}
        self._seen: set[str] = set()
        self._complete: dict[str, set[str]] = {}  # claims, with their groups
        self._lost: set[str] = set()  # of complete claims, in segments that cannot be read
        rows: dict[str, int] = {}
        for step in plan_steps(store):
            plan = read_plan(store, step)
            if plan is not None:
                self._record(plan)
                rows.update(plan.segment_rows)
        settled = Counter(segment for segment, _ in self._state.settled)
        skip = frozenset(key for key, count in rows.items() if settled[key] == count)
        self._reader = LogReader(store, skip=skip)

    @property
    def quarantined(self) -> dict[str, str]:
        """Bad segments so far, by key, with what is wrong with them."""
        return dict(self._reader.quarantined)

    def plan(
        self,
        step: int,
        version: int | Callable[[], int],
        *,
        timeout: float,
        rows: int | None = None,
        lag: Lag | None = None,
    ) -> Plan:
        """The plan of `step`: that in the store, else a new one at trainer version `version`, then durable.

        version: a function is called at each look. lag: of a version at this step, by default one a version.
        rows: of this step and later ones, instead of the settings' (batch-size warm-up).
        Raises `PlanTimeoutError` after `timeout` seconds, `PlanError` for a step that later plans passed.
        """
        existing = read_plan(self._store, step)
        if existing is not None:
            if step not in self._plans:
                self._record(existing)
            return existing
        if self._plans and step < max(self._plans):
            raise PlanError(
                f"{plan_key(step)} is missing while {plan_key(max(self._plans))} exists: plans are "
                "made in order. "
                f"Restore it, or restart with --discard-plans-after {step - 1}"
            )
        if rows is not None:
            self._settings = replace(self._settings, rows=rows)

        def selected() -> Selection:
            return self._select(step, version() if callable(version) else version, lag)

        def look() -> Plan | None:
            selection = selected()
            if selection.plan is not None:
                return self._commit(selection.plan, lag)
            self._grant(selection)
            return None

        return wait_for(
            look,
            lambda: self._shortage(selected(), step),
            timeout=timeout,
            poll=POLL_SECONDS,
            error=PlanTimeoutError,
            sleep=self._sleep,
        )

    def open_credits(self) -> int:
        """Reads the log and lets workers claim as many groups as may be outstanding now; returns the grant.

        For before the first plan, so that workers are busy while the trainer compiles.
        """
        return self._grant(self._select(step=0, version=0, lag=None))

    def _select(self, step: int, version: int, lag: Lag | None) -> Selection:
        # Claims before the log: a claim is completed after its segments are written.
        complete = self._complete_groups() if self._reader.unreadable else set()
        known = len(self._reader.quarantined)
        arrived = self._reader.poll()
        if len(self._reader.quarantined) > known:
            self._refuse()
        for ref in arrived:
            self._groups.setdefault(ref.group_id, []).append(ref)
            self._seen.add(ref.group_id)
        self._lost = complete - self._seen
        return select(
            (ref for refs in self._groups.values() for ref in refs),
            step=step,
            version=version,
            state=self._state,
            settings=self._settings,
            lag=lag,
            segment_rows=self._reader.segment_rows,
            quarantined=self._reader.quarantined,
        )

    def _refuse(self) -> None:
        """Tells each writer how many of its segments were not taken, and why the last one was not."""
        for writer, keys in by_writer(self._reader.quarantined).items():
            reason = self._reader.quarantined[keys[-1]]
            record = Refusals(writer=writer, segments=len(keys), segment=keys[-1], reason=reason)
            self._store.put_json(record.key, record.to_json())

    def _commit(self, plan: Plan, lag: Lag | None) -> Plan:
        if not create_plan(self._store, plan):
            existing = read_plan(self._store, plan.step)
            if existing is None:
                raise PlanError(
                    f"{plan_key(plan.step)} appeared and vanished: another trainer discards plans of this run"
                )
            logger.warning("%s was made by another process meanwhile; it stands", plan_key(plan.step))
            plan = existing
        self._record(plan)
        self._grant(self._select(plan.step + 1, plan.version, lag))
        return plan

    def _record(self, plan: Plan) -> None:
        self._state.record(plan)
        self._plans[plan.step] = plan.version
        self._seen.update(self._state.copies)
        settled = self._state.settled
        for group in {row.group_id for row in plan.rows} | {
            row.group_id for rows in plan.drops.values() for row in rows
        }:
            refs = self._groups.get(group)
            if refs is not None and all((ref.segment, ref.row) in settled for ref in refs):
                del self._groups[group]

    def _grant(self, selection: Selection) -> int:
        """Credits also count groups from which nothing can be drawn any more, so workers never run dry.

        A group is such a one too if its claim is complete and no segment that can be read has it.
        """
        seen = self._seen | self._reader.quarantined_groups | self._lost
        live = len(selection.live_groups)
        outstanding = self._outstanding
        if selection.plan is None and live >= outstanding:
            # Everything granted is here and fills no step: as many groups as would, by what these hold.
            outstanding = max(live + 1, -(-live * selection.target // max(selection.amount, 1)))
            outstanding = min(outstanding, 2 * live)
        return grant(self._store, len(seen - selection.live_groups) + outstanding)

    def _complete_groups(self) -> set[str]:
        """Groups of complete claims; one that is complete is read once."""
        for claim in read_claims(self._store, skip=self._complete):
            if claim.done:
                self._complete[claim.key] = {group_id(i) for i in range(claim.start, claim.end)}
        return set().union(*self._complete.values())

    def _shortage(self, selection: Selection, step: int) -> str:
        drops = {reason: len(rows) for reason, rows in selection.drops.items()}
        return (
            f"trajectories to plan step {step}: {selection.amount} of {selection.target} positions can be "
            f"filled from {len(selection.live_groups)} groups, dropped since the last plan: "
            f"{drops or 'none'}, "
            f"quarantined segments: {len(self._reader.quarantined)}, groups ever seen: {len(self._seen)}. "
            f"Look whether rollout workers run on {self._store.url} and serve a recent version; lower "
            "rl.batch, or raise trajectories.wait_timeout_s"
        )
