"""Reading plans: masks are those of the plan's version, waits end with a name."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_bridge.trajectories.gate import Gate
from rollout_bridge.trajectories.log import SegmentWriter
from rollout_bridge.trajectories.plan import Plan, PlanError, load_rows, plan_steps, wait_for_plan
from rollout_bridge.trajectories.planner import Planner
from tests.rollout_bridge.trajectories.conftest import LENGTH, selection_settings


@pytest.fixture
def planned(store, make_group):
    for index in range(6):
        SegmentWriter(store, "w").append(make_group(index, versions=[[0, 2, 3], [3, 3, 3]], created_at=index))
    settings = selection_settings(3 * LENGTH, gate=Gate(max_lag=1, min_fresh_fraction=0.1))
    made = Planner(store, settings, outstanding_groups=9, sleep=lambda _: None)
    for step in range(4):
        made.plan(step, 3, timeout=0)
    return store


def test_stale_tokens_are_masked_at_the_plans_version(planned) -> None:
    row = load_rows(planned, waited_for(planned, 0), {})[0]
    # versions 0, 2, 3 at trainer version 3 with lag at most 1: the first is stale.
    assert row.mask.tolist() == [False, False, False, True, True]
    assert np.array_equal(row.trajectory.versions, [-1, -1, 0, 2, 3]) and row.advantage == -0.5


def test_waiting_for_a_plan_that_never_comes_names_it(planned) -> None:
    with pytest.raises(PlanError, match=r"waited 0 s for plans/00000004.json"):
        waited_for(planned, 4, timeout=0)


def test_a_plan_made_meanwhile_is_served(store, make_group) -> None:
    made = Planner(store, selection_settings(2 * LENGTH), outstanding_groups=1, sleep=lambda _: None)

    def sleep(_: float) -> None:
        SegmentWriter(store, "w").append(make_group(0))
        made.plan(0, 0, timeout=0)

    plan = waited_for(store, 0, sleep=sleep)
    assert [row.trajectory_id for row in plan.rows] == ["00000000/0", "00000000/1"]


def waited_for(store, step: int, *, timeout: float = 60.0, sleep=lambda _: None) -> Plan:
    return wait_for_plan(store, step, timeout=timeout, poll=0.1, sleep=sleep)


def test_other_objects_among_the_plans_and_segments_stop_no_planner(planned, make_group) -> None:
    """The plans made stand, and the next step is planned from the next group."""
    for name in ("plans/readme.json", "plans/1.json", "plans/README", "trajectories/readme.json"):
        planned.put(name, b"not ours")
    assert plan_steps(planned) == [0, 1, 2, 3]
    made = Planner(planned, selection_settings(2 * LENGTH), outstanding_groups=9, sleep=lambda _: None)
    SegmentWriter(planned, "w").append(make_group(90, versions=[[3, 3, 3], [3, 3, 3]]))
    made.plan(4, 3, timeout=0)
    assert plan_steps(planned) == [0, 1, 2, 3, 4]
