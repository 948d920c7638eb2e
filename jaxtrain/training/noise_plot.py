"""The gradient noise scale of a run against its batch size, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.optim.noise_scale import NoiseEstimate, smoothed
from jaxtrain.training.metrics import read_metrics

PICTURE = "noise_scale.png"


@dataclass(frozen=True)
class NoiseCurve:
    """One phase, a point a measured step.

    tokens_seen: in all phases. batch: tokens with loss. scale: smoothed noise scale in the same unit, None
    where it has no value yet.
    """

    phase: str
    tokens_seen: list[int]
    batch: list[float]
    scale: list[float | None]


def curves(rows: Sequence[dict[str, Any]]) -> list[NoiseCurve]:
    """Curves of the phases that measured their noise, in order. Estimate and batch count tokens with loss."""
    found = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        measured = [row for row in rows if row["phase"] == phase and row.get("noise_trace") is not None]
        if measured:
            estimates = [NoiseEstimate(row["noise_signal"], row["noise_trace"]) for row in measured]
            found.append(
                NoiseCurve(
                    phase=phase,
                    tokens_seen=[row["tokens_seen"] for row in measured],
                    batch=[row["weight"] for row in measured],
                    scale=smoothed(estimates),
                )
            )
    return found


def write_noise_plot(run_dir: Path, *, title: str) -> Path:
    """Draws runs/<name>/noise_scale.png from the run's metrics.

    Raises:
      ValueError: no step of the run measured its noise.
    """
    found = curves(read_metrics(run_dir))
    if not found:
        raise ValueError(
            f"{run_dir}: no step measured its gradient noise; set measure_noise in a phase, with batches of "
            "two microbatches or more"
        )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    for curve in found:
        known = [(x, y) for x, y in zip(curve.tokens_seen, curve.scale, strict=True) if y]
        if known:
            axis.plot(*zip(*known, strict=True), label=f"{curve.phase}: noise scale")
        axis.plot(curve.tokens_seen, curve.batch, linestyle="--", label=f"{curve.phase}: batch")
    axis.set_yscale("log")
    axis.set_xlabel("tokens seen")
    axis.set_ylabel("tokens with loss")
    axis.set_title(f"{title}: gradient noise scale and batch size", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    picture = run_dir / PICTURE
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return picture
