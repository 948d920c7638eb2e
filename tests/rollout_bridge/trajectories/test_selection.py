"""Plans: pure, each trajectory once, drops by reason, and an account that adds up."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.rl.filters.no_signal import NoSignal
from rollout_bridge.store import Store
from rollout_bridge.trajectories import accounting, segment
from rollout_bridge.trajectories.claims import ClaimBook, grant, granted
from rollout_bridge.trajectories.gate import Gate
from rollout_bridge.trajectories.groups import Boundary
from rollout_bridge.trajectories.log import LogReader, SegmentWriter, TrajectoryRef
from rollout_bridge.trajectories.packing import best_fit, positions
from rollout_bridge.trajectories.plan import (
    Plan,
    PlanError,
    create_plan,
    discard_plans_after,
    load_rows,
    plan_key,
    plan_steps,
    read_plan,
)
from rollout_bridge.trajectories.planner import Planner, PlanTimeoutError
from rollout_bridge.trajectories.schema import Status
from rollout_bridge.trajectories.selection import (
    RESERVED_REASONS,
    SelectionSettings,
    SelectionState,
    select,
)
from tests.rollout_bridge.trajectories.conftest import LENGTH, selection_settings

OK, BAD = Status.OK, Status.ENVIRONMENT_FAILURE


def planner(store: Store, settings: SelectionSettings, outstanding: int = 64) -> Planner:
    return Planner(store, settings, outstanding_groups=outstanding, sleep=lambda _: None)


def ids(plan: Plan) -> list[str]:
    return [row.trajectory_id for row in plan.rows]


def test_a_plan_by_hand(store, make_group) -> None:
    write = SegmentWriter(store, "w").append
    # Version 6, lag at most 2: versions 4 and up are fresh.
    write(make_group(0, rewards=[0, 1, 1, 0], versions=[[4, 4], [3, 4], [3, 3], [5]], created_at=1))
    write(make_group(1, rewards=[1, 1], statuses=[OK, BAD], versions=[[6], [6]], created_at=2))
    write(make_group(2, rewards=[0, 1, 1], statuses=[OK, BAD, BAD], versions=[[6]] * 3, created_at=3))
    write(make_group(3, rewards=[1, 1], versions=[[6], [6]], created_at=4))
    write(make_group(0, rewards=[1, 0], versions=[[6], [6]], created_at=9))  # a second copy of group 0
    # 3 + 3 + 2 + 2 + 2 positions: the five slots of groups 0 and 1, and no more.
    settings = selection_settings(12, gate=Gate(max_lag=2, min_fresh_fraction=0.5))
    plan = planner(store, settings).plan(7, 6, timeout=0)
    # Group 0: member 2 is stale; member 1, with the oldest version, comes first. All four make the mean 0.5.
    # Group 1: member 0 stands in for the failed one. Group 2: a third is left, discarded. Group 3 waits.
    expected = [
        ("0/1", 0, 0.5, 1),
        ("0/0", 0, -0.5, 2),
        ("0/3", 0, -0.5, 1),
        ("1/0", 0, 0.0, 1),
        ("1/0", 1, 0.0, 1),
    ]
    assert [(r.trajectory_id[7:], r.slot, r.advantage, r.trainable_tokens) for r in plan.rows] == expected
    dropped = {
        reason: [(r.segment[-9:-8], r.trajectory_id[7:]) for r in rows] for reason, rows in plan.drops.items()
    }
    assert dropped == {
        "duplicate": [("4", "0/0"), ("4", "0/1")],
        "environment_failure": [("1", "1/1"), ("2", "2/1"), ("2", "2/2")],
        "group_discarded": [("2", "2/0")],
        "stale": [("0", "0/2")],
    }
    assert (plan.step, plan.version, plan.tokens) == (7, 6, 4 + 4 + 3 + 3 + 3)
    counts = accounting.count(store)
    assert counts.adds_up and counts.missing == 0
    assert (counts.written, counts.trained, counts.slots, counts.pending) == (13, 4, 5, 2)
    assert counts.dropped == {"duplicate": 2, "environment_failure": 3, "group_discarded": 1, "stale": 1}
    # Tokens trained: lag 2, 2, 2 (two of 0/0, one of 0/1), lag 1 (0/3), lag 0 twice (1/0 in two slots).
    assert (counts.lag_mean, counts.lag_max, counts.trained_tokens) == (7 / 6, 2, 6)
    assert counts.spans_crossing == 1 and counts.generated_tokens == 7 + 2 + 3 + 2 + 2


def test_no_signal_is_dropped_if_asked(store, make_group) -> None:
    SegmentWriter(store, "w").append([*make_group(0, rewards=[1, 1]), *make_group(1, rewards=[0, 1])])
    plan = planner(store, selection_settings(2 * LENGTH, filters=(NoSignal(),))).plan(0, 0, timeout=0)
    assert ids(plan) == ["00000001/0", "00000001/1"]
    assert [row.group_id for row in plan.drops["no_signal"]] == ["00000000"] * 2


@dataclass(frozen=True)
class Best:
    """Keeps those of the highest reward among the members it is given."""

    reason: str

    def keep(self, members, *, version):
        return [ref.reward == max(other.reward for other in members) for ref in members]


@dataclass(frozen=True)
class Odd:
    """Keeps members of odd number, from version 1 on."""

    reason: str = "even_member"

    def keep(self, members, *, version):
        return [version == 0 or ref.member % 2 == 1 for ref in members]


def test_filters_drop_by_their_own_reasons_each_on_what_those_before_it_left(store, make_group) -> None:
    """Rewards 0 1 2 3: of the odd members 1 and 3 the best is 3. The advantage is over all four, mean 1.5."""
    SegmentWriter(store, "w").append(make_group(0, rewards=[0, 1, 2, 3], versions=[[1, 1, 1]] * 4))
    options = selection_settings(LENGTH, filters=(Odd(), Best("beaten"), Best("never")))
    plan = planner(store, options).plan(0, 1, timeout=0)
    assert [(row.trajectory_id, row.advantage) for row in plan.rows] == [("00000000/3", 1.5)]
    stored = read_plan(store, 0)
    assert stored is not None
    assert {reason: [row.trajectory_id for row in rows] for reason, rows in stored.drops.items()} == {
        "even_member": ["00000000/0", "00000000/2"],
        "beaten": ["00000000/1"],
    }
    counts = accounting.count(store)
    assert counts.adds_up and counts.dropped == {"even_member": 2, "beaten": 1}


@dataclass(frozen=True)
class Given:
    """The numbers it is given, for every group."""

    values: object

    def of_group(self, members):
        return self.values

    def of_tokens(self, trajectory, advantage):
        return advantage


@dataclass(frozen=True)
class Answering:
    """The answers it is given, for every group."""

    answers: tuple[bool, ...]
    reason: str = "asked"

    def keep(self, members, *, version):
        return self.answers


def plan_of_two(store, make_group, **changes) -> Plan:
    """Of one group of two."""
    SegmentWriter(store, "w").append(make_group(0))
    return planner(store, selection_settings(2 * LENGTH, **changes)).plan(0, 0, timeout=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64])
def test_advantages_of_numpy_become_numbers_of_json(store, make_group, dtype) -> None:
    """3 and -2 are exact in each of them."""
    plan = plan_of_two(store, make_group, advantage=Given(np.array([3, -2], dtype)))
    assert [type(row.advantage) for row in plan.rows] == [float, float]
    stored = json.loads(store.read(plan_key(0)))
    assert [row["advantage"] for row in stored["rows"]] == [3.0, -2.0]
    assert read_plan(store, 0) == plan


@pytest.mark.parametrize(
    "values", [(0.5, float("nan")), (float("inf"), 0.5), (0.5,), (0.5, 0.5, 0.5), ()], ids=str
)
def test_advantages_that_are_not_one_finite_number_a_member_are_refused(store, make_group, values) -> None:
    with pytest.raises(PlanError, match=r"advantage Given gives \[.*\] for the 2 members of group 00000000"):
        plan_of_two(store, make_group, advantage=Given(values))
    assert plan_steps(store) == []


@pytest.mark.parametrize("answers", [(), (True,), (True, True, False)], ids=str)
def test_a_filter_answers_once_a_member(store, make_group, answers) -> None:
    with pytest.raises(PlanError, match=f"filter Answering: {len(answers)} answers for 2 members"):
        plan_of_two(store, make_group, filters=(Answering(answers),))
    assert plan_steps(store) == []


def test_a_filter_has_no_reason_of_the_plans_own(store, make_group) -> None:
    """Those are the reasons in the account of each test here; its drops would be counted as theirs."""
    assert {"duplicate", "environment_failure", "group_discarded", "other_experts"} < RESERVED_REASONS
    for reason in ("stale", "too_long", "quarantined"):
        with pytest.raises(PlanError, match=rf"trajectories.filters: \['{reason}'\] are reasons"):
            selection_settings(2 * LENGTH, filters=(Best("beaten"), Best(reason)))


def test_a_filter_sees_the_trainers_version(store, make_group) -> None:
    SegmentWriter(store, "w").append(make_group(0))
    refs = LogReader(store).poll()
    options = selection_settings(2 * LENGTH, filters=(Odd(),))
    drops = [
        select(refs, step=0, version=version, state=SelectionState(), settings=options).drops
        for version in (0, 1)
    ]
    assert [list(found) for found in drops] == [[], ["even_member"]]


def test_experts_of_another_model_are_dropped_by_name(store, make_group) -> None:
    """Groups of odd number have experts [tokens, 3 layers, 2 each], those of even number none."""
    SegmentWriter(store, "w").append([*make_group(0, rewards=[0, 1]), *make_group(1, rewards=[0, 1])])
    right = selection_settings(4 * LENGTH, routed_experts=(3, 2))
    wrong = selection_settings(2 * LENGTH, routed_experts=(4, 2))
    refs = LogReader(store).poll()
    taken = select(refs, step=0, version=0, state=SelectionState(), settings=right)
    assert taken.plan is not None and not taken.drops and len(taken.plan.rows) == 4
    plan = planner(store, wrong).plan(0, 0, timeout=0)
    assert ids(plan) == ["00000000/0", "00000000/1"]
    assert [row.group_id for row in plan.drops["other_experts"]] == ["00000001"] * 2


def test_a_step_is_full_when_what_arrived_does_not_fit(store, make_group) -> None:
    # Lengths 2 + 3 = 5, 4 positions each; 10 hold two, and the third shows that the step is full.
    settings = selection_settings(10)
    writer = SegmentWriter(store, "w")
    writer.append(make_group(0))
    with pytest.raises(PlanTimeoutError, match="8 of 10 positions"):
        planner(store, settings).plan(0, 0, timeout=0)
    writer.append(make_group(1, lengths=[11, 3]))  # the first is 13 long, which no step holds
    plan = planner(store, settings).plan(0, 0, timeout=0)
    assert ids(plan) == ["00000000/0", "00000000/1"] and plan.tokens == 10
    assert [row.trajectory_id for row in plan.drops["too_long"]] == ["00000001/0"]


def test_each_step_draws_evenly_from_length_bins_over_time(store, make_group) -> None:
    writer = SegmentWriter(store, "w")
    for index in range(6):
        writer.append(make_group(index, rewards=[0, 1, 0], lengths=[1, 1, 20], created_at=index))
    # Trajectories of 2 and 21 positions: 46 hold two of each.
    made = planner(store, selection_settings(46, length_bin_edges=(10,)))
    plans = [made.plan(step, 0, timeout=0) for step in range(3)]
    assert len({name for plan in plans for name in ids(plan)}) == 12, "no trajectory twice"
    longs = [sum(row.tokens > 10 for row in plan.rows) for plan in plans]
    assert longs == [2, 2, 2], "half of the draws are long while both bins last"


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_selection_is_pure_uses_each_row_once_and_adds_up(make_group, data) -> None:
    """Random groups, copies, failures and steps; a planner restarted at random makes the same plans."""
    store = Store.open(f"memory://{uuid.uuid4().hex}", probe=False)
    options = selection_settings(
        data.draw(st.integers(3, 30)),  # positions; trajectories have 3, 5, 6 and 10 tokens
        gate=Gate(max_lag=1, min_fresh_fraction=0.5),
        boundary=data.draw(st.sampled_from(list(Boundary))),
        filters=data.draw(st.sampled_from([(), (NoSignal(),)])),
        length_bin_edges=(5, 8),
    )
    writers = [SegmentWriter(store, name) for name in "ab"]
    made = planner(store, options)
    step = 0
    for version in range(data.draw(st.integers(1, 4))):
        for index in data.draw(st.lists(st.integers(0, 9), max_size=4, unique=True)):
            size = data.draw(st.integers(1, 4))
            group = make_group(
                index,
                rewards=data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size)),
                statuses=data.draw(st.lists(st.sampled_from([OK, OK, BAD]), min_size=size, max_size=size)),
                versions=[[max(0, version - n), version][: 1 + n % 2] * (1 + n) for n in range(size)],
                created_at=version,
            )
            data.draw(st.sampled_from(writers)).append(group)
        if data.draw(st.booleans()):
            made = planner(store, options)
        try:
            plan = made.plan(step, version, timeout=0)
        except PlanTimeoutError:
            continue
        state = SelectionState()
        for earlier in range(step):
            state.record(read_plan(store, earlier))
        refs = LogReader(store).poll()
        rows = Counter(ref.segment for ref in refs)
        random.Random(0).shuffle(refs)
        again = select(
            refs, step=step, version=version, state=state, settings=options, segment_rows=rows
        ).plan
        assert again.to_bytes() == plan.to_bytes() == store.read(plan_key(step))
        state.record(plan)
        left = [positions(ref.tokens) for ref in refs if (ref.segment, ref.row) not in state.settled]
        room = options.sequence_length - sum(positions(row.tokens) for row in plan.rows)
        assert room == 0 or room > 0 and left and min(left) > room, "full, and not too full"
        step += 1
    counts = accounting.count(store)
    assert counts.adds_up and counts.missing == 0 and counts.plans == step


def test_an_existing_plan_is_read_not_made(store, make_group) -> None:
    options = selection_settings(2 * LENGTH)
    SegmentWriter(store, "w").append([*make_group(0), *make_group(1)])
    first = planner(store, options).plan(0, 0, timeout=0)
    restarted = planner(store, options)
    assert restarted.plan(0, 99, timeout=0) == first, "the version it was made at stands"
    assert set(ids(restarted.plan(1, 1, timeout=0))).isdisjoint(ids(first))
    assert not create_plan(store, first)


def test_a_gap_in_the_plans_is_an_error(store, make_group) -> None:
    made = planner(store, selection_settings(2 * LENGTH))
    SegmentWriter(store, "w").append([*make_group(0), *make_group(1)])
    made.plan(5, 0, timeout=0)
    with pytest.raises(PlanError, match=r"plans/00000004.json is missing .* --discard-plans-after 3"):
        made.plan(4, 0, timeout=0)


def test_discarded_plans_return_their_trajectories(store, make_group) -> None:
    options = selection_settings(2 * LENGTH)
    SegmentWriter(store, "w").append([row for index in range(3) for row in make_group(index)])
    made = planner(store, options)
    before = [made.plan(step, 0, timeout=0) for step in range(3)]
    assert discard_plans_after(store, 0) == [1, 2] and plan_steps(store) == [0]
    assert accounting.count(store).pending == 4
    again = planner(store, options)
    assert [again.plan(step, 0, timeout=0) for step in range(3)] == before


def test_a_plan_whose_segment_is_gone_or_changed_says_the_way_out(store, make_group) -> None:
    key = SegmentWriter(store, "w").append(make_group(0))
    plan = planner(store, selection_settings(2 * LENGTH)).plan(3, 0, timeout=0)
    assert [row.trajectory.trajectory_id for row in load_rows(store, plan, {})] == ids(plan)
    data = store.read(key)
    store.delete(key)
    with pytest.raises(PlanError, match=rf"plans/00000003.json trains on {key}.*--discard-plans-after 2"):
        load_rows(store, plan, {})
    assert accounting.count(store).missing == 2
    other = SegmentWriter(store, "x").append(make_group(1))
    store.put(key, store.read(other))
    with pytest.raises(PlanError, match="expects 00000000/0 at row 0 .* holds 00000001/0"):
        load_rows(store, plan, {})
    store.put(key, data)
    assert accounting.count(store).missing == 0


def test_damaged_plans_are_named(store) -> None:
    store.put(plan_key(4), b'{"step": 4}')
    with pytest.raises(PlanError, match=r"plans/00000004.json is not a plan.*--discard-plans-after 3"):
        read_plan(store, 4)


def test_credits_follow_what_is_settled_so_drops_do_not_starve_workers(store, make_group) -> None:
    made = planner(store, selection_settings(2 * LENGTH, filters=(NoSignal(),)), outstanding=3)
    assert made.open_credits() == 3 == granted(store)
    writer = SegmentWriter(store, "w")
    writer.append(make_group(0, rewards=[0, 1]))
    writer.append([*make_group(1, rewards=[1, 1]), *make_group(2, rewards=[1, 1])])
    assert made.open_credits() == 5, "two groups can never be drawn; one waits"
    made.plan(0, 0, timeout=0)
    assert granted(store) == 6
    assert planner(store, made._settings, outstanding=3).open_credits() == 6, "a restart grants the same"


def run_of_lengths(lengths: list[int], *, rows: int, sequence_length: int, group: int, steps: int):
    """(rows used, share of the positions filled) of each step, while groups of `lengths` (tokens) arrive.

    A group arrives only while the step is not full: the least surplus there can be.
    """
    draw, state, waiting, found = random.Random(0), SelectionState(), {}, []
    options = selection_settings(
        sequence_length, rows=rows, length_bin_edges=tuple(sequence_length * i // 4 for i in (1, 2, 3))
    )
    index = 0
    for step in range(steps):
        while (
            plan := select(waiting.values(), step=step, version=0, state=state, settings=options).plan
        ) is None:
            for member in range(group):
                waiting[index, member] = TrajectoryRef(
                    segment=f"s{index}", row=member, trajectory_id=f"{index:08d}/{member}", member=member,
                    group_id=f"{index:08d}", prompt_index=index, tokens=draw.choice(lengths),
                    reward=member % 2, version_counts=((0, 1),), status=OK, created_at=index,
                )  # fmt: skip
            index += 1
        state.record(plan)
        for row in plan.rows:
            del waiting[tuple(map(int, row.trajectory_id.split("/")))]
        used = [positions(row.tokens) for row in plan.rows]
        found.append((len(best_fit(used, sequence_length)), sum(used) / (rows * sequence_length)))
    return found


# Tokens of 960 trajectories of a quickstart, prompts included: 2 of them, 3 at most, are in a row of 64.
QUICKSTART = [
    length
    for length, count in zip(
        (18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31),
        (1, 4, 20, 60, 103, 85, 40, 31, 24, 26, 74, 203, 289),
        strict=True,
    )
    for _ in range(count)
]


@pytest.mark.parametrize(
    ("lengths", "shape", "fill"),
    [
        (QUICKSTART, {"rows": 64, "sequence_length": 64, "group": 16}, 0.87),
        (QUICKSTART, {"rows": 32, "sequence_length": 128, "group": 16}, 0.91),
        ([101, 951], {"rows": 1, "sequence_length": 1000, "group": 2}, 0.92),
        ([101, 951], {"rows": 8, "sequence_length": 1000, "group": 4}, 0.91),
    ],
)
def test_a_step_takes_the_rows_it_has_and_fills_them(lengths, shape, fill) -> None:
    """The rows of its batch and no more, so that the microbatches are those of the ramp, in every step.

    `fill` is what a run of 60 steps measures, less 1 %. Planned by tokens, 55 of 60 such steps took more
    microbatches, at 57 % of their positions.
    """
    found = run_of_lengths(lengths, steps=60, **shape)
    assert {rows for rows, _ in found} == {shape["rows"]}
    assert sum(share for _, share in found) / len(found) >= fill


def test_answers_that_shrink_get_the_credits_that_fill_a_step(store, make_group) -> None:
    """32 groups of 2, 26 tokens each, are 25 positions 64 times, and 12 tokens are 11: twice as many and more
    are needed then, and no group may be outstanding but those that have arrived.
    """
    made = planner(store, selection_settings(100, rows=16), outstanding=32)
    writer = SegmentWriter(store, "w")
    assert made.open_credits() == 32
    for index in range(32):
        writer.append(make_group(index, lengths=[24, 24]))
    made.plan(0, 0, timeout=0)
    written = 32
    for step in range(1, 5):
        for _ in range(50):
            try:
                made.plan(step, 0, timeout=0)
                break
            except PlanTimeoutError:
                assert granted(store) > written, "workers may go on"
                for index in range(written, granted(store)):
                    writer.append(make_group(index, lengths=[10, 10]))
                written = granted(store)
    assert plan_steps(store) == [0, 1, 2, 3, 4]
    assert written <= 3 * 32 + 5 * 73, "and little more than the steps take: 9 a row, 16 rows, 2 a group"


def test_a_segment_that_cannot_be_read_at_all_holds_no_credits(store, make_group) -> None:
    """Its groups are those of complete claims that no other segment has: here 0 and 1 of 0 to 3."""
    grant(store, 4)
    book, writer = ClaimBook(store, "w", count=4, lease_seconds=60.0), SegmentWriter(store, "w")
    claim, _ = book.acquire()
    lost = writer.append([*make_group(0), *make_group(1)])
    store.put(lost, b"PAR1 torn")
    writer.append([*make_group(2), *make_group(3)])
    made = planner(store, selection_settings(9 * LENGTH), outstanding=4)
    assert made.open_credits() == 4, "their worker may still make them again"
    book.complete(claim)
    assert made.open_credits() == 2 + 4 == granted(store)
    restarted = planner(store, selection_settings(9 * LENGTH), outstanding=4)
    assert restarted.open_credits() == restarted.open_credits() == 6


def test_quarantined_rows_are_counted_and_do_not_hold_credits(store, make_group) -> None:
    SegmentWriter(store, "w").append([*make_group(0), *make_group(1)])
    misplaced = segment.encode([*make_group(5), *make_group(6)], writer="w", sequence=0)
    store.put("trajectories/odd@name/00000000.parquet", misplaced)
    made = planner(store, selection_settings(LENGTH), outstanding=1)
    made.plan(0, 0, timeout=0)
    assert list(made.quarantined) == ["trajectories/odd@name/00000000.parquet"]
    assert granted(store) == 2 + 1, "two groups lost, two live, one may be outstanding"
    counts = accounting.count(store)
    assert counts.adds_up and counts.dropped == {"quarantined": 4} and counts.quarantined_segments == 1


def test_wrong_settings_name_the_field() -> None:
    with pytest.raises(ValueError, match="rows 1 and sequence_length 0 must be at least 1"):
        selection_settings(0)
    with pytest.raises(ValueError, match=r"min_valid_fraction: 2 "):
        selection_settings(1, min_valid_fraction=2)
    with pytest.raises(ValueError, match=r"length_bin_edges: \(8, 8\) must ascend strictly"):
        selection_settings(1, length_bin_edges=(8, 8))
