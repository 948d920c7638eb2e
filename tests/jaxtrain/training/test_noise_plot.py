"""The picture of the noise scale: from the rows that measured it, and a remedy where none did."""

from __future__ import annotations

import pytest

from jaxtrain.training.metrics import MetricsWriter, read_metrics
from jaxtrain.training.noise_plot import curves, write_noise_plot


def write(directory, *, measured: bool) -> None:
    with MetricsWriter(directory) as metrics:
        for step in range(1, 6):
            noise = {"noise_signal": 2.0, "noise_trace": 200.0} if measured and step > 1 else {}
            metrics.write(step, {"tokens_seen": 100 * step, "weight": 40.0 * step, **noise}, phase="sft")


def test_a_constant_scale_is_drawn_beside_the_batch(tmp_path):
    write(tmp_path, measured=True)
    (curve,) = curves(read_metrics(tmp_path))
    assert (curve.phase, curve.tokens_seen, curve.batch) == ("sft", [200, 300, 400, 500], [80, 120, 160, 200])
    assert curve.scale == pytest.approx([100.0] * 4)
    picture = write_noise_plot(tmp_path, title="run")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_measured_nothing_is_told_how(tmp_path):
    write(tmp_path, measured=False)
    with pytest.raises(ValueError, match="set measure_noise in a phase"):
        write_noise_plot(tmp_path, title="run")
