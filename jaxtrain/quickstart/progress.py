"""The progress of a run, read from its metrics file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.training.metrics import FILENAME, read_metrics

RECENT = 10  # rows that rates and times are averaged over
AFTER = {"warm_start": "first_rollouts", "rl": "done"}  # the phase shown after the last step of a phase


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The progress of a run at one moment. None: not known yet.

    phase: "starting", "warm_start", "first_rollouts", "rl", "done", "resuming". step, steps: of the phase.
    delta_bytes, reference_bytes: of the last delta, full versions left out; tokens_per_s: trained, recent.
    seconds_left: of this phase at the recent (median) pace: a step that waited for a start does not count.
    """

    phase: str = "starting"
    step: int = 0
    steps: int = 0
    loss: float | None = None
    reward: float | None = None
    lag_mean: float | None = None
    lag_max: float | None = None
    version: int | None = None
    delta_bytes: float | None = None
    reference_bytes: float | None = None
    tokens_per_s: float | None = None
    seconds_left: float | None = None


def progress(rows: list[dict[str, Any]], config: AsyncGrpoConfig) -> RunProgress:
    """The progress after `rows` of the run's metrics."""
    if not rows:
        return RunProgress()
    phase = rows[-1]["phase"]
    steps = {"warm_start": config.warm_start.steps, "rl": config.rl.steps}[phase]
    of_phase = [row for row in rows if row["phase"] == phase]
    recent = of_phase[-RECENT:]
    pace = [_seconds(row) for row in recent]
    tokens = sum(row.get("tokens") or 0 for row in recent)
    published = next((row for row in reversed(of_phase) if row.get("delta_reference_bytes")), {})
    last = rows[-1]
    return RunProgress(
        phase=AFTER[phase] if len(of_phase) >= steps else phase,
        step=len(of_phase),
        steps=steps,
        loss=last.get("loss"),
        reward=last.get("reward_mean"),
        lag_mean=last.get("lag_mean"),
        lag_max=last.get("lag_max"),
        version=last.get("version"),
        delta_bytes=published.get("delta_bytes"),
        reference_bytes=published.get("delta_reference_bytes"),
        tokens_per_s=tokens / sum(pace) if sum(pace) > 0 else None,
        seconds_left=statistics.median(pace) * max(0, steps - len(of_phase)),
    )


def _seconds(row: dict[str, Any]) -> float:
    return (row.get("step_seconds") or 0.0) + (row.get("wait_seconds") or 0.0)


class ProgressReader:
    """Reads the metrics again only when the file has grown.

    since: unix seconds; while the newest row is older the run is "resuming".
    """

    def __init__(self, run_dir: Path, config: AsyncGrpoConfig, *, since: float = 0.0) -> None:
        self._file = run_dir / FILENAME
        self._config = config
        self._since = since
        self._size = 0
        self._last = RunProgress()

    def read(self) -> RunProgress:
        size = self._file.stat().st_size if self._file.exists() else 0
        if size != self._size:
            self._size = size
            rows = read_metrics(self._file)
            self._last = progress(rows, self._config)
            if rows and max(row["time"] for row in rows) < self._since:
                self._last = replace(self._last, phase="resuming", seconds_left=None, tokens_per_s=None)
        return self._last
