"""Metrics on disk: JSON lines to read back, TensorBoard events to view."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

FILENAME = "metrics.jsonl"
_KEYS = ("phase", "step", "time")
_SECONDS = "step_seconds"


def flatten(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings, joining keys with "/". One-element arrays become numbers, NaN and inf None.

    Raises:
      TypeError: a value that is neither a scalar, a string, None nor a mapping.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, prefix=f"{name}/"))
        else:
            flat[name] = _scalar(name, value)
    return flat


def _scalar(name: str, value: Any) -> Any:
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(
        f"metric {name}: found {type(value).__name__} {getattr(value, 'shape', '')}, expected a scalar, a "
        "string or a mapping of them; reduce it before writing"
    )


class MetricsWriter:
    """Appends rows to `directory/metrics.jsonl` and scalars to `directory/tensorboard`.

    Rows are never rewritten: after a restart from step k the rows of later steps are written again, and
    `read_metrics` keeps the newer ones. A row is flushed before `write` returns, so a crash can only cut
    the last line.

    A row with `step_seconds` gets `goodput`: the seconds of all steps that count over the time since the
    first step began, restarts included. A step that a restart does again counts once.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, *, restored_step: int | None = None) -> None:
        """Opens the files, creating the directory.

        Args:
          directory: of this run; it may hold the files of an earlier start of it. None writes nothing, as in
            processes of a run after its first.
          restored_step: step of the checkpoint this start continues from: rows of later steps are superseded.
        """
        self._file = self._events = None
        self._began: float | None = None
        self._useful = 0.0
        if directory is None:
            return
        self._path = Path(directory) / FILENAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        if restored_step is not None:
            self.restored(restored_step)
        if first := next((row for row in _rows(self._path) if _SECONDS in row), None):
            self._began = _began(first, first["time"])
            kept = [] if restored_step is None else read_metrics(self._path)
            self._useful = sum(row.get(_SECONDS, 0.0) for row in kept)
        self._events = SummaryWriter(
            logdir=str(Path(directory) / "tensorboard"),
            purge_step=None if restored_step is None else restored_step + 1,
        )

    def restored(self, step: int) -> None:
        """Rows of later steps are superseded."""
        self._append({"restored_step": step, "time": time.time()})

    def write(self, step: int, values: Mapping[str, Any], *, phase: str = "train") -> None:
        """Writes one row: phase, step, time (unix seconds) and the flattened values.

        Raises:
          ValueError: a value named as one of the row's own keys.
          TypeError: a value that is not a scalar (see `flatten`).
        """
        flat = flatten(values)
        if taken := [key for key in _KEYS if key in flat]:
            raise ValueError(f"metrics row: {taken} are the row's own keys; name the values otherwise")
        if self._events is None:
            return
        now = time.time()
        if _SECONDS in flat:
            if self._began is None:
                self._began = _began(flat, now)
            self._useful += flat[_SECONDS]
            flat["goodput"] = self._useful / max(now - self._began, self._useful)
        self._append({"phase": phase, "step": int(step), "time": now, **flat})
        for name, value in flat.items():
            if isinstance(value, (int, float)):
                self._events.add_scalar(f"{phase}/{name}", value, int(step), walltime=now)

    def _append(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes both files."""
        for opened in (self._file, self._events):
            if opened is not None:
                opened.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str], *, phase: str | None = None) -> list[dict[str, Any]]:
    """Reads rows, ordered by step, the newest of each phase and step; of one phase if given.

    Args:
      path: of metrics.jsonl, or of the directory that holds it.

    Raises:
      ValueError: a line that is not a JSON object. A last line without its newline is incomplete and skipped.
    """
    file = Path(path) / FILENAME if Path(path).is_dir() else Path(path)
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for row in _rows(file):
        if "restored_step" in row:
            newest = {key: kept for key, kept in newest.items() if key[1] <= row["restored_step"]}
        else:
            newest[row["phase"], row["step"]] = row
    rows = [row for row in newest.values() if phase is None or row["phase"] == phase]
    return sorted(rows, key=lambda row: row["step"])


def _began(row: Mapping[str, Any], written: float) -> float:
    """When the step of a row began (unix seconds), with its wait for data."""
    return written - row[_SECONDS] - row.get("wait_seconds", 0.0)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of whole lines: a line is whole once its newline is there."""
    *lines, _torn = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(_not_a_row(file, number, line)) from error
        if not isinstance(row, dict):
            raise ValueError(_not_a_row(file, number, line))
        yield row


def _not_a_row(file: Path, number: int, line: bytes) -> str:
    return f"{file}:{number}: found {line[:80]!r}, expected a JSON object; remove a line that was edited"


def _drop_torn_line(file: Path) -> None:
    """Cuts off what a crash left after the last newline, so that the next row starts a line of its own."""
    if file.exists():
        whole = file.read_bytes().rfind(b"\n") + 1
        os.truncate(file, whole)
