"""The curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

CURVES = "curves.png"


def draw(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Warm-start loss, reward, lag and delta size by optimizer step, as PNG at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5), constrained_layout=True)
    loss, reward, lag, delta = axes.flat
    # The RL loss stays near zero whatever is learnt, so only the warm start's loss is drawn.
    _plot(loss, [row for row in rows if row["phase"] == "warm_start"], "loss", label="next token")
    _plot(reward, rows, "reward_mean", label="of all trajectories")
    _plot(reward, rows, "reward_exact", label="exact, of all trajectories")
    _plot(reward, rows, "truncated_fraction", label="cut off, of all trajectories")
    _plot(lag, rows, "lag_mean", label="mean")
    _plot(lag, rows, "lag_max", label="max")
    deltas = [row for row in rows if row.get("delta_reference_bytes")]  # full versions have no reference
    _plot(delta, deltas, "delta_bytes", label="delta", scale=1e-3)
    _plot(delta, deltas, "delta_reference_bytes", label="its order-0 entropy", scale=1e-3)
    for axis, name in (
        (loss, "warm-start loss"),
        (reward, "reward"),
        (lag, "lag, optimizer steps"),
        (delta, "version, kB"),
    ):
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot(axis: Any, rows: Sequence[dict[str, Any]], key: str, *, label: str, scale: float = 1.0) -> None:
    points = [(row["step"], row[key] * scale) for row in rows if row.get(key) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 60 else None)
