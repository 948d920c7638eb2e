"""A segment gives back what went in; anything else is refused, never believed."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.trajectories import segment
from rollout_bridge.trajectories.schema import Status, Trajectory


def same(a: Trajectory, b: Trajectory) -> bool:
    for field in dataclasses.fields(Trajectory):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or not np.array_equal(x, y):
                return False
        elif x != y:
            return False
    return True


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), groups=st.integers(1, 3))
def test_round_trip(make_group, lengths, groups) -> None:
    rows = [
        row for i in range(groups) for row in make_group(i, rewards=[0.3] * len(lengths), lengths=lengths)
    ]
    data = segment.encode(rows, writer="w", sequence=0)
    back = segment.decode(data)
    assert len(back) == len(rows) and all(same(a, b) for a, b in zip(rows, back, strict=True))
    assert segment.finished_prompts(data) == tuple(range(groups))
    assert data == segment.encode(rows, writer="w", sequence=0)


def test_plain_parquet_readers_see_the_columns(make_group) -> None:
    table = pq.read_table(io.BytesIO(segment.encode(make_group(1), writer="w", sequence=0)))
    assert table["token_ids"].to_pylist()[0] == [1, 2, 3, 4, 5]
    assert dict(table["rewards"].to_pylist()[1]) == {"correct": 1.0, "exact": 1.0}
    assert table["routed_experts_shape"].to_pylist()[0] == [5, 3, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.arange(4, dtype=np.int32)}, "trainable has shape"),
        ({"token_ids": np.full(5, -2, np.int32)}, "none negative"),
        ({"behavior_logprobs": np.array([0, 0, np.nan, 0, 0], np.float32)}, "not finite"),
        ({"behavior_logprobs": np.array([0, 0, 0.5, 0, 0], np.float32)}, "above 0"),
        ({"behavior_logprobs": np.array([-1, 0, 0, 0, 0], np.float32)}, "prompt tokens"),
        ({"versions": np.full(5, -1, np.int32)}, "has no version"),
        ({"versions": np.zeros(5, np.int32)}, "not trainable has a version"),
        ({"reward": float("inf")}, "not finite"),
        ({"trajectory_id": "00000007/0"}, "is not member"),
        ({"turns": ()}, "turns do not cover"),
        ({"trainable": np.zeros(5, bool), "versions": np.full(5, -1, np.int32),
          "behavior_logprobs": np.zeros(5, np.float32)}, "without a trainable token"),
        ({"routed_experts": np.zeros((4, 3, 2), np.int16)}, "routed_experts has shape"),
        ({"routed_experts": np.full((5, 3, 2), -2, np.int16)}, "below -1"),
    ],
)  # fmt: skip
def test_a_row_that_breaks_the_schema_is_refused_by_writer_and_reader(
    make_group, monkeypatch, change, message
) -> None:
    bad = [dataclasses.replace(make_group(0)[0], **change), make_group(0)[1]]
    with pytest.raises(segment.SegmentError, match=message):
        segment.encode(bad, writer="w", sequence=0)
    with monkeypatch.context() as careless:  # a writer without checks
        careless.setattr(segment, "_check", lambda *_: None)
        data = segment.encode(bad, writer="w", sequence=0)
    with pytest.raises(segment.SegmentError, match=message):
        segment.decode(data)


def test_groups_must_be_whole_and_single(make_group) -> None:
    a, b = make_group(0), make_group(1)
    for rows in ([a[0], b[0], a[1], b[1]], [a[1]], [*a, *b, *a], [a[0], a[0]]):
        with pytest.raises(segment.SegmentError):
            segment.encode(rows, writer="w", sequence=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_bytes_raise_segment_error_or_decode_to_checked_rows(make_group, data) -> None:
    good = bytearray(
        segment.encode(make_group(0, statuses=[Status.OK, Status.TIMEOUT]), writer="w", sequence=0)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    for blob in (bytes(good), bytes(good[:cut])):
        try:
            rows = segment.decode(blob)
        except segment.SegmentError:
            continue
        segment.encode(rows, writer="w", sequence=0)  # whatever is let through keeps the schema


def test_a_flipped_bit_in_the_tokens_is_noticed(make_group) -> None:
    good = segment.encode(make_group(0, lengths=[30, 30]), writer="w", sequence=0)
    row_group = pq.read_metadata(io.BytesIO(good)).row_group(0)
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    [tokens] = [column for column in columns if column.path_in_schema.startswith("token_ids")]
    end = tokens.dictionary_page_offset + tokens.total_compressed_size
    for position in range(end - 12, end):
        bad = bytearray(good)
        bad[position] ^= 4
        with pytest.raises(segment.SegmentError):
            segment.decode(bytes(bad))


def test_footer_must_agree_with_the_rows(make_group, monkeypatch) -> None:
    with monkeypatch.context() as lying:
        lying.setattr(segment.json, "dumps", lambda _: "[5]")
        data = segment.encode(make_group(0), writer="w", sequence=0)
    with pytest.raises(segment.SegmentError, match=r"prompts \[5\] are finished, the rows hold \[0\]"):
        segment.decode(data)
