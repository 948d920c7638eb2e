"""Metrics files: what was written reads back, across crashes and restarts."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxtrain.training import metrics
from jaxtrain.training.metrics import MetricsWriter, flatten, read_metrics


def _values(rows, name):
    return [(row["phase"], row["step"], row[name]) for row in rows]


def test_rows_are_flat_json_with_null_for_what_is_not_finite(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            3, {"loss": {"next_token": jnp.float32(1.5), "mtp": float("nan")}, "norm": np.float64("inf")}
        )
        writer.write(3, {"reward": True, "note": "held out", "skipped": None, "n": np.int64(4)}, phase="eval")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line.pop("time") > 1.7e9 for line in lines)
    assert lines == [
        {"phase": "train", "step": 3, "loss/next_token": 1.5, "loss/mtp": None, "norm": None},
        {"phase": "eval", "step": 3, "reward": True, "note": "held out", "skipped": None, "n": 4},
    ]


def test_a_row_can_be_read_while_the_writer_is_open(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 2.0})
        assert _values(read_metrics(tmp_path), "loss") == [("train", 1, 2.0)]


def test_rows_after_the_restored_step_are_superseded(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": float(step)})
        writer.write(4, {"loss": 0.4}, phase="eval")
    with MetricsWriter(tmp_path, restored_step=2) as writer:
        writer.write(3, {"loss": 30.0})
        writer.write(3, {"loss": 31.0})
    expected = [("train", 1, 1.0), ("train", 2, 2.0), ("train", 3, 31.0)]
    assert _values(read_metrics(tmp_path), "loss") == expected
    assert _values(read_metrics(tmp_path / "metrics.jsonl", phase="train"), "loss") == expected
    assert read_metrics(tmp_path, phase="eval") == []


def test_goodput_counts_each_step_once_over_all_time_since_the_first_began(tmp_path, monkeypatch):
    """By hand: began at 100. 8 of 10 s; 18 of 20; step 2 again: 8 + 12 of 100; all again: 10 of 200."""
    monkeypatch.setattr(metrics.time, "time", lambda: clock)

    def row(writer: MetricsWriter, step: int, **seconds: float) -> float:
        writer.write(step, seconds)
        return next(row["goodput"] for row in read_metrics(tmp_path, phase="train") if row["step"] == step)

    clock = 110.0
    with MetricsWriter(tmp_path) as writer:
        assert row(writer, 1, step_seconds=8.0, wait_seconds=2.0) == pytest.approx(8 / 10)
        writer.write(1, {"reward": 1.0}, phase="eval")
        clock = 120.0
        assert row(writer, 2, step_seconds=10.0) == pytest.approx(18 / 20)
    clock = 200.0
    with MetricsWriter(tmp_path, restored_step=1) as writer:
        assert row(writer, 2, step_seconds=12.0) == pytest.approx(20 / 100)
    clock = 300.0
    with MetricsWriter(tmp_path) as writer:
        assert row(writer, 1, step_seconds=10.0) == pytest.approx(10 / 200)
    assert "goodput" not in read_metrics(tmp_path, phase="eval")[0]


def test_a_torn_last_line_is_left_out_and_the_next_start_goes_on(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    for torn in (b'{"phase": "tr', '{"note": "é'.encode()[:-1], b'{"phase": "train", "step": 2}'):
        file.write_bytes(whole + torn)
        assert _values(read_metrics(file), "loss") == [("train", 1, 1.0)]
    with MetricsWriter(tmp_path, restored_step=1) as writer:
        writer.write(2, {"loss": 2.0})
    assert _values(read_metrics(file), "loss") == [("train", 1, 1.0), ("train", 2, 2.0)]


@pytest.mark.parametrize("line", ["not json", "[1]"])
def test_a_damaged_line_is_named(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{line}\n{{"phase": "train", "step": 1}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: found .* expected a JSON object; remove a line"):
        read_metrics(file)


def test_tensorboard_gets_the_finite_numbers_by_phase(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"loss": {"main": 1.25}, "bad": float("nan"), "note": "text"})
    (file,) = (tmp_path / "tensorboard").iterdir()
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in _events(file.read_bytes())
        for value in event.summary.value
    ]
    assert scalars == [(7, "train/loss/main", 1.25)]


def _events(data: bytes):
    """TFRecord framing: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_what_is_no_scalar_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"metric router/load: found ndarray \(4,\).*reduce it"):
        flatten({"router": {"load": np.ones(4)}})
    with (
        MetricsWriter(tmp_path) as writer,
        pytest.raises(ValueError, match=r"\['step'\] are the row's own keys"),
    ):
        writer.write(1, {"step": 4})
    assert read_metrics(tmp_path) == []


def test_a_process_without_a_directory_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MetricsWriter(None, restored_step=3) as metrics:
        metrics.write(4, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []
