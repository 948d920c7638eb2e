"""Serving plans: resume is no interruption, masks are those of the plan's version, waits end with a name."""

from __future__ import annotations

import json

import grain
import numpy as np
import pytest

from rollout_bridge.trajectories.dataset import PlanDataset
from rollout_bridge.trajectories.gate import Gate
from rollout_bridge.trajectories.log import SegmentWriter
from rollout_bridge.trajectories.plan import PlanError
from rollout_bridge.trajectories.planner import Planner
from tests.rollout_bridge.trajectories.conftest import TOKENS, selection_settings


@pytest.fixture
def planned(store, make_group):
    for index in range(6):
        SegmentWriter(store, "w").append(make_group(index, versions=[[0, 2, 3], [3, 3, 3]], created_at=index))
    settings = selection_settings(3 * TOKENS, gate=Gate(max_lag=1, min_fresh_fraction=0.1))
    made = Planner(store, settings, outstanding_groups=9, sleep=lambda _: None)
    for step in range(4):
        made.plan(step, 3, timeout=0)
    return store


def described(step) -> tuple:
    return (
        step.step,
        step.version,
        [(r.trajectory.trajectory_id, r.slot, r.advantage, r.mask.tolist()) for r in step.rows],
    )


@pytest.mark.parametrize("stop", range(4))
def test_resume_is_no_interruption(planned, stop) -> None:
    whole = iter(PlanDataset(planned))
    everything = [described(next(whole)) for _ in range(4)]
    first = iter(PlanDataset(planned))
    head = [described(next(first)) for _ in range(stop)]
    state = json.loads(json.dumps(first.get_state()))
    second = iter(PlanDataset(planned))
    second.set_state(state)
    assert state == {"step": stop}
    assert head + [described(next(second)) for _ in range(4 - stop)] == everything


def test_stale_tokens_are_masked_at_the_plans_version(planned) -> None:
    row = next(iter(PlanDataset(planned))).rows[0]
    # versions 0, 2, 3 at trainer version 3 with lag at most 1: the first is stale.
    assert row.mask.tolist() == [False, False, False, True, True]
    assert np.array_equal(row.trajectory.versions, [-1, -1, 0, 2, 3]) and row.advantage == -0.5


def test_grain_transformations_apply_and_carry_the_state(planned) -> None:
    dataset = PlanDataset(planned, first_step=1).map(lambda step: step.step)
    assert isinstance(dataset, grain.IterDataset)
    iterator = iter(dataset)
    assert [next(iterator), next(iterator)] == [1, 2]
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert next(resumed) == 3


def test_waiting_for_a_plan_that_never_comes_names_it(planned) -> None:
    slept: list[float] = []
    iterator = iter(
        PlanDataset(
            planned,
            first_step=4,
            timeout_seconds=3,
            poll_seconds=1,
            clock=lambda: float(len(slept)),
            sleep=slept.append,
        )
    )
    with pytest.raises(PlanError, match=r"waited 3 s for plans/00000004.json"):
        next(iterator)
    assert slept == [1, 1, 1] and iterator.get_state() == {"step": 4}


def test_a_plan_made_meanwhile_is_served(store, make_group) -> None:
    made = Planner(store, selection_settings(2 * TOKENS), outstanding_groups=1, sleep=lambda _: None)

    def sleep(_: float) -> None:
        SegmentWriter(store, "w").append(make_group(0))
        made.plan(0, 0, timeout=0)

    step = next(iter(PlanDataset(store, sleep=sleep)))
    assert [row.trajectory.trajectory_id for row in step.rows] == ["00000000/0", "00000000/1"]
