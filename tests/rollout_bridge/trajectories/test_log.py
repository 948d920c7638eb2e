"""The log loses nothing, overwrites nothing, and a bad segment costs only itself."""

from __future__ import annotations

import dataclasses

import pytest

from rollout_bridge.store import Store
from rollout_bridge.trajectories import segment
from rollout_bridge.trajectories.log import LogReader, SegmentWriter
from rollout_bridge.trajectories.schema import Status


def test_reader_sees_each_row_once_with_what_selection_needs(store, make_group) -> None:
    writer, reader = SegmentWriter(store, "w"), LogReader(store)
    assert reader.poll() == []
    key = writer.append(make_group(3, versions=[[5, 5, 6], [7]], rewards=[0.25, 1.0], created_at=9.0))
    first, second = reader.poll()
    assert (first.segment, first.row, second.row) == (key, 0, 1) == ("trajectories/w/00000000.parquet", 0, 1)
    assert (first.trajectory_id, first.group_id, first.tokens) == ("00000003/0", "00000003", 5)
    assert first.version_counts == ((5, 2), (6, 1)) and first.trainable_tokens == 3
    assert (first.reward, first.status, first.created_at) == (0.25, Status.OK, 9.0)
    assert reader.poll() == []
    writer.append(make_group(4))
    assert [ref.prompt_index for ref in reader.poll()] == [4, 4]


def test_a_restarted_writer_continues_its_sequence(store, make_group) -> None:
    keys = [SegmentWriter(store, "w").append(make_group(index)) for index in range(3)]
    assert keys == [f"trajectories/w/0000000{n}.parquet" for n in range(3)]


def test_two_writers_with_one_id_overwrite_nothing(store, make_group) -> None:
    a, b = SegmentWriter(store, "w"), SegmentWriter(store, "w")
    assert a.append(make_group(0)) != b.append(make_group(1))
    assert {ref.prompt_index for ref in LogReader(store).poll()} == {0, 1}


def test_a_create_whose_answer_got_lost_is_not_written_again(store, make_group, monkeypatch) -> None:
    create = store.create
    monkeypatch.setattr(store, "create", lambda key, data: create(key, data) and False)
    assert SegmentWriter(store, "w").append(make_group(0)) == "trajectories/w/00000000.parquet"
    assert len(LogReader(store).poll()) == 2


def test_evaluation_rows_stay_out_of_the_training_log(store, make_group, caplog) -> None:
    rows = [dataclasses.replace(row, purpose="eval") for row in make_group(0)]
    with pytest.raises(segment.SegmentError, match="'eval'"):
        SegmentWriter(store, "w").append(rows)
    store.put("trajectories/w/00000000.parquet", segment.encode(rows, writer="w", sequence=0))
    store.put("evaluations/e/w-0.parquet", segment.encode(rows, writer="w", sequence=0))
    reader = LogReader(store)
    assert reader.poll() == [] and list(reader.quarantined) == ["trajectories/w/00000000.parquet"]


def test_bad_segments_are_quarantined_by_name_and_the_rest_is_read(store: Store, make_group, caplog) -> None:
    SegmentWriter(store, "good").append(make_group(1))
    data = segment.encode(make_group(0), writer="w", sequence=0)
    store.put("trajectories/bad/00000000.parquet", b"not parquet")
    store.put("trajectories/bad/00000001.parquet", data[:-20])
    store.put("trajectories/bad/notes.txt", data)
    reader = LogReader(store)
    assert {ref.prompt_index for ref in reader.poll()} == {1}
    assert sorted(reader.quarantined) == [
        "trajectories/bad/00000000.parquet",
        "trajectories/bad/00000001.parquet",
        "trajectories/bad/notes.txt",
    ]
    assert "trajectories/bad/00000000.parquet" in caplog.text and "not a Parquet file" in caplog.text
    assert reader.quarantined_groups == {"00000000"}, "the footer of the misnamed one can be read"
    caplog.clear()
    assert reader.poll() == [] and not caplog.text, "judged once"


def test_writer_ids_are_keys(store) -> None:
    with pytest.raises(ValueError, match="writer id"):
        SegmentWriter(store, "../w")
