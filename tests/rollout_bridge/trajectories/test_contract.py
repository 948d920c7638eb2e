"""Hostile rows beside good ones: each is quarantined by name, its writer told, the others are used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.parquet as parquet
import pytest

from jaxtrain.rl.filters.no_signal import NoSignal
from rollout_bridge.control import Refusals, read
from rollout_bridge.store import Store
from rollout_bridge.trajectories import segment
from rollout_bridge.trajectories.accounting import count
from rollout_bridge.trajectories.contract import (
    CONTRACT_KEY,
    Contract,
    ContractError,
    compare,
    create_or_compare,
)
from rollout_bridge.trajectories.log import LogReader, SegmentWriter, segment_key
from rollout_bridge.trajectories.planner import Planner
from rollout_bridge.trajectories.schema import Status, Trajectory
from rollout_bridge.trajectories.segment import SegmentTooLarge
from tests.rollout_bridge.trajectories.conftest import LENGTH, TOKENS, made_group, selection_settings

CONTRACT = Contract(
    environment={"name": "reasoning_gym", "options": {"task": "spell_backward"}, "seed": 0},
    group_size=2,
    temperature=1.0,
    vocabulary=64,
    max_tokens=TOKENS,
    num_experts=8,
    reward_range=(0.0, 1.0),
)


def first(**changes):
    """The group of prompt 5 with another first member."""

    def broken() -> list[Trajectory]:
        head, *rest = made_group(5)
        return [replace(head, **changes), *rest]

    return broken


HOSTILE = {
    "greedy": (first(temperature=0.0), {}, "temperature 0, the run's is 1"),
    "negative temperature": (first(temperature=-1.0), {}, "temperature -1, the run's is 1"),
    "reward of another scale": (first(reward=57.0), {}, r"reward 57 is not in \[0, 1\]"),
    "reward that overflows float32": (first(reward=1e39), {}, r"reward 1e\+39 is not in \[0, 1\]"),
    "token beyond the vocabulary": (
        first(token_ids=np.array([1, 2, 3, 64, 5], np.int32)),
        {},
        "token id 64 is not below the vocabulary of 64",
    ),
    "too long": (
        lambda: made_group(5, lengths=(4, 3)),
        {},
        f"{TOKENS + 1} tokens, the run's limit is {TOKENS}",
    ),
    "smaller group": (
        lambda: made_group(5)[:1],
        {},
        "group 00000005 has 1 trajectories, the run's group_size is 2",
    ),
    "other prompts": (
        lambda: made_group(5),
        {"environment": {"name": "other", "options": {}, "seed": 0}},
        "its worker had another contract: environment .*'other'",
    ),
    "larger group": (
        lambda: made_group(5),
        {"group_size": 4},
        "another contract: group_size 4, the run's is 2",
    ),
    "no log-probability": (
        first(behavior_logprobs=np.array([0, 0, np.nan, -1, -1], np.float32)),
        {},
        "behavior_logprobs are not finite",
    ),
    "experts that do not exist": (
        first(routed_experts=np.tile(np.int16([[1, 8]]), (TOKENS, 3, 1))),
        {},
        r"routed experts: ids are in \[1, 8\], expected -1 to 7",
    ),
    "every token to expert 0": (
        first(routed_experts=np.zeros((TOKENS, 3, 2), np.int16)),
        {},
        "routed experts: a token has the same expert twice",
    ),
    "reward NaN": (first(reward=float("nan")), {}, "a number is missing or not finite"),
}


@pytest.fixture
def run(store) -> Store:
    create_or_compare(store, CONTRACT)
    return store


def write_unchecked(monkeypatch, store: Store, rows: list[Trajectory], changes: dict) -> str:
    """As a worker that checks nothing."""
    monkeypatch.setattr(segment, "_check", lambda *args: None)
    writer = SegmentWriter(store, "hostile", contract=CONTRACT.model_copy(update=changes))
    key = writer.append(rows)
    monkeypatch.undo()
    return key


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_row_is_named_and_its_writer_told_and_the_good_ones_are_planned(run, monkeypatch, kind):
    rows, changes, reason = HOSTILE[kind]
    key = write_unchecked(monkeypatch, run, rows(), changes)
    good = SegmentWriter(run, "good", contract=CONTRACT).append(made_group(0) + made_group(1))
    planner = Planner(run, selection_settings(LENGTH, rows=4), outstanding_groups=4)
    plan = planner.plan(0, 0, timeout=5)
    assert {row.segment for row in plan.rows} == {good} and list(plan.quarantined) == [key]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(plan.quarantined[key])
    told = read(run, Refusals, "control/refused/hostile.json")
    assert told is not None and (told.segments, told.segment) == (1, key)
    assert told.reason == plan.quarantined[key]
    assert read(run, Refusals, "control/refused/good.json") is None
    assert count(run).adds_up and count(run).quarantined_segments == 1


def test_a_failed_row_needs_no_reward_in_range(run):
    rows = made_group(0, statuses=[Status.ENVIRONMENT_FAILURE, Status.OK], rewards=[-5.0, 1.0])
    SegmentWriter(run, "w", contract=CONTRACT).append(rows)
    reader = LogReader(run)
    assert len(reader.poll()) == 2 and not reader.quarantined


def test_a_reward_out_of_range_is_a_failure_of_its_own_row():
    good, bad = made_group(0, rewards=[1.0, 57.0])
    assert CONTRACT.with_reward_in_range(good) is good
    found = CONTRACT.with_reward_in_range(bad)
    assert (found.status, found.reward, found.rewards) == (Status.ENVIRONMENT_FAILURE, 0.0, {})
    assert "reward 57 is not in [0, 1]" in found.metadata["detail"]


def test_another_contract_is_refused_with_every_field_that_differs(run):
    create_or_compare(run, CONTRACT)  # the same run again
    other = CONTRACT.model_copy(update={"temperature": 0.7, "group_size": 8})
    for refused in (
        lambda: create_or_compare(run, other),
        lambda: compare(run, other, who="worker"),
    ):
        with pytest.raises(
            ContractError, match=r"group_size 8, the run's is 2; temperature 0.7, the run's is 1.0"
        ):
            refused()
    assert read(run, Contract, CONTRACT_KEY) == CONTRACT


def test_a_version_that_the_trainer_has_not_published_is_not_fresh(store):
    """A group with one that it published this moment waits; what it cannot know of is dropped by name."""
    writer = SegmentWriter(store, "w")
    writer.append(made_group(0, versions=[[3], [3]]) + made_group(1, versions=[[4], [3]]))
    ahead = writer.append(made_group(2, versions=[[3], [3, 10**6]], rewards=[0.5, 0.5]))
    planner = Planner(store, selection_settings(LENGTH, rows=1, filters=(NoSignal(),)), outstanding_groups=4)
    writer.append([row for index in range(3, 5) for row in made_group(index, versions=[[3], [3]])])
    plan = planner.plan(0, 3, timeout=5)
    assert [row.trajectory_id for row in plan.drops["ahead_of_trainer"]] == ["00000002/1"]
    assert plan.drops["ahead_of_trainer"][0].segment == ahead
    named = [row.trajectory_id for row in plan.rows] + [
        r.trajectory_id for d in plan.drops.values() for r in d
    ]
    assert not [name for name in named if name.startswith("00000001")]
    assert plan.settled["trajectories"] == len(set(named)) - 1, "it is in no mean"
    writer.append([row for index in range(5, 9) for row in made_group(index, versions=[[4], [4]])])
    later = [planner.plan(step, 4, timeout=5) for step in (1, 2, 3)]
    assert "00000001/0" in [row.trajectory_id for plan in later for row in plan.rows]


def rewritten(data: bytes, change) -> bytes:
    import io

    table = parquet.read_table(io.BytesIO(data))
    metadata, sink = table.schema.metadata, io.BytesIO()
    parquet.write_table(change(table).replace_schema_metadata(metadata), sink, write_page_checksum=True)
    return sink.getvalue()


def test_columns_of_other_versions_cost_nothing():
    """A worker that is older lacks some, one that is newer has more; what selection needs must be there."""
    rows = made_group(0)
    data = segment.encode(rows, writer="w", sequence=0)
    without = ["max_tokens", "finish_reason", "kv_policy", "rewards", "engine", "worker", "generate_seconds"]
    without += ["purpose", "routed_experts", "routed_experts_shape", "metadata"]
    older = segment.decode(rewritten(data, lambda table: table.drop_columns(without)))
    assert [t.reward for t in older] == [t.reward for t in rows] and older[0].purpose == "train"
    newer = segment.decode(rewritten(data, lambda t: t.append_column("mood", [["good"] * t.num_rows])))
    assert [t.trajectory_id for t in newer] == [t.trajectory_id for t in rows]
    with pytest.raises(segment.SegmentError, match=r"columns \['reward'\] are missing"):
        segment.decode(rewritten(data, lambda table: table.drop_columns(["reward"])))


def test_what_no_reader_would_take_is_written_as_several_segments(store, monkeypatch):
    monkeypatch.setattr(segment, "MAX_ROWS", 4)
    writer = SegmentWriter(store, "w")
    last = writer.append([row for index in range(5) for row in made_group(index)])
    reader = LogReader(store)
    assert len({ref.group_id for ref in reader.poll()}) == 5 and not reader.quarantined
    assert last == segment_key("w", 2) and sorted(reader.segment_rows.values()) == [2, 4, 4]
    with pytest.raises(SegmentTooLarge, match="6 rows, a reader takes at most 4"):
        writer.append(made_group(9, rewards=[0, 1] * 3))
    monkeypatch.setattr(segment, "MAX_UNCOMPRESSED_BYTES", 100)
    with pytest.raises(SegmentTooLarge, match="bytes uncompressed, a reader takes at most 100"):
        writer.append(made_group(9))


def test_several_segments_of_which_one_failed_are_in_the_log_once(store, monkeypatch):
    monkeypatch.setattr(segment, "MAX_ROWS", 2)
    writer, real, calls = SegmentWriter(store, "w"), store.create, []

    def failing(key, data):
        calls.append(key)
        if len(calls) == 3:
            raise OSError("once")
        return real(key, data)

    monkeypatch.setattr(store, "create", failing)
    rows = [row for index in range(4) for row in made_group(index)]
    with pytest.raises(OSError, match="once"):
        writer.append(rows)
    writer.append(rows)
    found = [ref.group_id for ref in LogReader(store).poll()]
    assert sorted(found) == sorted(row.group_id for row in rows)
