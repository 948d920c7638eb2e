"""The running time of a run: one line for each invocation, so that the pauses between them do not count."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TIMELINE = "invocations.jsonl"


@contextmanager
def recorded(run_dir: Path) -> Iterator[None]:
    """Append {start, end} (unix seconds) when the body ends, also by an exception."""
    start = time.time()
    try:
        yield
    finally:
        with (run_dir / TIMELINE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"start": start, "end": time.time(), "pid": os.getpid()}) + "\n")


def recorded_seconds(run_dir: Path) -> float | None:
    """Sum over invocations; None if none was recorded."""
    try:
        lines = (run_dir / TIMELINE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    spans = [json.loads(line) for line in lines]
    return sum(span["end"] - span["start"] for span in spans)
