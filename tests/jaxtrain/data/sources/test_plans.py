"""Batches of plans: made when the trainer is near enough, the same again after a resume."""

from __future__ import annotations

import json
import threading
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.sources.base import BatchShape, BatchSpec, prefetching
from jaxtrain.data.sources.plans import PlannedBatches, Planning, TrainerClock, discard_plans
from jaxtrain.losses.base import replay_column
from jaxtrain.losses.policies.base import POLICY_COLUMNS
from jaxtrain.rl.advantages.group_mean import GroupMean
from jaxtrain.rl.filters.no_signal import NoSignal
from rollout_bridge.store import Store
from rollout_bridge.trajectories.log import SegmentWriter
from rollout_bridge.trajectories.plan import PlanError, plan_key, plan_steps, read_plan
from rollout_bridge.waiting import Interrupted, wait_for
from tests.rollout_bridge.trajectories.conftest import TOKENS, made_group

ROOT = Path(__file__).parents[4]
PATIENCE = 300.0  # seconds for what takes a moment, on a machine that stalls
SHAPE = BatchShape(microbatches=1, rows=4, sequence_length=8)
ROWS_A_STEP = 8  # of 5 tokens, 4 positions each


def config(*overrides: str) -> AsyncGrpoConfig:
    loaded = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    assert isinstance(loaded, AsyncGrpoConfig)
    return loaded


@pytest.fixture
def store() -> Store:
    """13 groups of two trajectories with rewards 0 and 1, all of version 0."""
    store = Store.open(f"memory://{uuid.uuid4().hex}", probe=False)
    for index in range(13):
        SegmentWriter(store, "w").append(made_group(index, created_at=index))
    return store


def planning(store: Store, *overrides: str, **changes) -> Planning:
    usual = {
        "store": store,
        "config": config("trajectories.wait_timeout_s=300", *overrides),
        "advantage": GroupMean(),
        "filters": (NoSignal(),),
        "replayed": None,
        "clock": TrainerClock(),
        "version": lambda: 0,
        "lag": lambda version, step: step,
    }
    return Planning(**(usual | changes))


def spec(*, steps: int = 3, columns=POLICY_COLUMNS) -> BatchSpec:
    """Where it would wait, it is interrupted."""
    return BatchSpec(shape_at=lambda tokens: SHAPE, columns=columns, steps=steps, interrupted=lambda: True)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_is_planned_when_the_trainer_is_near_enough(store, ahead):
    """Plan k + 1 exists while step k is not finished if and only if plans_ahead is 1."""
    found = planning(store, f"trajectories.plans_ahead={ahead}")
    batches = iter(PlannedBatches(found, spec(steps=9)))
    if not ahead:
        with pytest.raises(Interrupted):
            next(batches)
    for step in range(2):
        found.clock.set(step)  # the trainer is at this step, which is not finished
        while len(plan_steps(store)) <= step + ahead:
            next(batches)
        with pytest.raises(Interrupted):
            next(batches)
        assert plan_steps(store) == list(range(step + ahead + 1))


@pytest.mark.parametrize(("lag", "planned"), [(0, [0]), (1, [0, 1])])
def test_without_lag_nothing_is_planned_ahead(store, lag, planned):
    """Whatever plans_ahead says: tokens of the version that step 0 makes are not there before it has ended.

    All weights here count as those of version 0, so that what has arrived would be fresh enough for plan 1.
    """
    found = planning(
        store,
        f"trajectories.max_lag={lag}",
        "trajectories.plans_ahead=1",
        lag=lambda version, step: 0,
    )
    found.clock.set(0)
    batches = iter(PlannedBatches(found, spec()))
    with pytest.raises(Interrupted):
        for _ in range(3):
            next(batches)
    assert plan_steps(store) == planned
    found.clock.set(1)
    next(batches)
    assert plan_steps(store) == [*planned, len(planned)]


def test_each_batch_has_the_shape_of_the_tokens_handed_out_before_it(store):
    """In its plan and in its packing: 16 positions hold 4 trajectories of 5 tokens, 32 hold 8."""
    found, asked = planning(store), []
    found.clock.set(9)

    def shape_at(tokens: int) -> BatchShape:
        asked.append(tokens)
        return replace(SHAPE, rows=2) if tokens < 4 * (TOKENS - 1) else SHAPE

    batches = iter(PlannedBatches(found, replace(spec(), shape_at=shape_at)))
    rows = [next(batches).batch.tokens.shape[1] for _ in range(3)]
    assert asked == [0, 0, 4 * (TOKENS - 1), 12 * (TOKENS - 1)]  # once for the first credits
    assert rows == [2, 4, 4]
    plans = [read_plan(store, step) for step in range(3)]
    assert [plan and len(plan.rows) for plan in plans] == [4, 8, 8]
    again = iter(PlannedBatches(found, replace(spec(), shape_at=shape_at)))
    again.set_state({"step": 2, "tokens": 12 * (TOKENS - 1)})
    next(again)
    assert asked[4:] == [0, 12 * (TOKENS - 1)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_thread_plans_the_next_step_as_soon_as_the_trainer_allows(store, ahead):
    """And not one more: closing then finds the plans that are there."""
    found = planning(store, f"trajectories.plans_ahead={ahead}")
    halt = threading.Event()
    waiting = replace(spec(), interrupted=halt.is_set)
    with prefetching(PlannedBatches(found, waiting), {}, halt) as batches:
        found.clock.set(0)
        next(batches)
        assert batches.get_state()["step"] == 1
        if ahead:
            wait_for(lambda: read_plan(store, 1), "plan 1", timeout=PATIENCE, poll=0.01, error=TimeoutError)
        else:
            found.clock.set(1)
            next(batches)
    assert plan_steps(store) == [0, 1]


def test_the_clock_lets_a_wait_go_on_only_at_its_step():
    clock, looks = TrainerClock(), []

    def interrupted() -> bool:
        looks.append(len(looks))
        if len(looks) == 2:
            clock.set(3)
        return False

    clock.wait_for(-1, interrupted)
    assert looks == []
    clock.set(2)
    clock.wait_for(2, interrupted)
    assert looks == []
    clock.wait_for(3, interrupted)
    assert looks == [0, 1]
    with pytest.raises(Interrupted):
        clock.wait_for(4, lambda: True)


def test_a_plan_has_the_newest_version_and_the_lag_of_each_at_its_step(store):
    """Also in the store, where every process and a restart read it. Lag 9 is over the 8 that are allowed."""
    newest = iter((3, 5, 5, 5))
    found = planning(store, version=lambda: next(newest), lag=lambda version, step: (4, 8, 9)[step])
    found.clock.set(1)
    batches = iter(PlannedBatches(found, spec()))
    metrics = [next(batches).metrics for _ in range(2)]
    assert [row["plan_version"] for row in metrics] == [3, 5]
    assert [(row["lag_mean"], row["lag_max"]) for row in metrics] == [(4, 4), (8, 8)]
    plans = [read_plan(store, step) for step in range(2)]
    assert [plan and (plan.version, plan.lags) for plan in plans] == [(3, ((0, 4),)), (5, ((0, 8),))]
    with pytest.raises(Interrupted):
        next(batches)


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_resume_serves_the_plans_that_are_there(store, stop):
    """Whatever version the trainer has then: the batches are those of no interruption."""
    found = planning(store)
    found.clock.set(9)
    whole = iter(PlannedBatches(found, spec()))
    expected, states = [], [whole.get_state()]
    for _ in range(3):
        expected.append({name: values.tolist() for name, values in next(whole).batch.columns.items()})
        states.append(json.loads(json.dumps(whole.get_state())))
    with pytest.raises(StopIteration):
        next(whole)
    assert states[3]["tokens"] == 3 * ROWS_A_STEP * (TOKENS - 1)
    again = iter(PlannedBatches(replace(found, version=lambda: 99), spec()))
    again.set_state(states[stop])
    resumed = [
        {name: values.tolist() for name, values in next(again).batch.columns.items()} for _ in range(3 - stop)
    ]
    assert resumed == expected[stop:]
    assert plan_steps(store) == [0, 1, 2]


@dataclass(frozen=True)
class Rising:
    """The group's number on the first token, one more on each that follows."""

    def of_group(self, members):
        return [10.0 * ref.member for ref in members]

    def of_tokens(self, trajectory, advantage):
        return advantage + np.arange(len(trajectory.token_ids), dtype=np.float32)


def test_an_advantage_of_each_token_reaches_the_batch(store):
    """At its token as a target: of tokens 0 to 4, those of 1 to 4."""
    found = planning(store, advantage=Rising())
    found.clock.set(0)
    batch = next(iter(PlannedBatches(found, spec()))).batch
    plan = read_plan(store, 0)
    assert plan is not None and len(plan.rows) == ROWS_A_STEP
    assert sorted(row.advantage for row in plan.rows) == [0.0] * 4 + [10.0] * 4
    advantages, segments = batch["advantages"], np.asarray(batch.segment_ids)
    found_rows = sorted(
        advantages[at][segments[at] == segment].tolist()
        for at in np.ndindex(segments.shape[:2])
        for segment in range(1, segments[at].max() + 1)
    )
    assert found_rows == [[1.0, 2.0, 3.0, 4.0]] * 4 + [[11.0, 12.0, 13.0, 14.0]] * 4


def test_what_a_loss_reads_is_that_of_the_trajectories(store):
    """The stand-ins have prompts of 2 tokens, log-probabilities -0.5, temperature 1, experts of every odd
    group, -1 each.
    """
    found = planning(store, replayed=(3, 2))
    found.clock.set(0)
    batch = next(iter(PlannedBatches(found, spec(columns=(*POLICY_COLUMNS, replay_column(3, 2)))))).batch
    valid = np.asarray(batch.segment_ids) > 0
    learnt = np.asarray(batch.loss_weights) == 1
    assert valid.sum() == ROWS_A_STEP * (TOKENS - 1) == SHAPE.positions
    np.testing.assert_array_equal(learnt, valid & (np.asarray(batch.positions) >= 1))
    assert (batch["behavior_logprobs"][learnt] == -0.5).all()
    assert (np.abs(batch["advantages"][valid]) == 0.5).all() and not batch["advantages"][~valid].any()
    assert (np.asarray(batch["temperature"]) == 1).all()
    assert batch["routed_experts"].shape == (1, 4, 8, 3, 2) and (batch["routed_experts"] == -1).all()


def test_the_rows_of_the_metrics_by_hand():
    """At version 2, lag at most 1: tokens of versions 0, 1, 2 and 2, 2, 2; the first is stale."""
    store = Store.open(f"memory://{uuid.uuid4().hex}", probe=False)
    SegmentWriter(store, "w").append(made_group(0, rewards=[0.0, 1.0], versions=[[0, 1, 2], [2, 2, 2]]))
    found = planning(
        store, "trajectories.max_lag=1", version=lambda: 2, lag=lambda version, step: 2 - version
    )
    found.clock.set(0)
    small = replace(spec(), shape_at=lambda tokens: BatchShape(1, 1, 8))
    metrics = dict(next(iter(PlannedBatches(found, small))).metrics)
    assert metrics == {
        "reward_mean": 0.5,
        "truncated_fraction": 0.0,
        "settled": 2,
        "reward_correct": 0.5,
        "reward_exact": 0.5,
        "quarantined_segments": 0,
        "reward_mean_trained": 0.5,
        "lag_mean": pytest.approx(1 / 5),
        "lag_max": 1,
        "masked_fraction": pytest.approx(1 / 6),
        "trajectories": 2,
        "mean_length": 5.0,
        "plan_version": 2,
    }


def test_plans_that_a_checkpoint_has_trained_are_not_discarded(store):
    found = planning(store)
    found.clock.set(9)
    batches = iter(PlannedBatches(found, spec()))
    for _ in range(3):
        next(batches)
    with pytest.raises(PlanError, match="newest checkpoint has trained RL steps up to 1; .* give 1 or more"):
        discard_plans(store, after=0, trained=2)
    discard_plans(store, after=1, trained=2)
    assert plan_steps(store) == [0, 1] and store.read(plan_key(2)) is None
