"""Start the children of a run, watch them, and stop them all when one fails or a signal arrives.

Invariant: processes.json names every child that may be alive. It is written before the next child starts, and
by the holder of the run's lock only.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from jaxtrain.quickstart.child import Child, ChildSpec, start
from rollout_bridge.files import write_whole
from rollout_bridge.waiting import looks

logger = logging.getLogger(__name__)

PROCESSES = "processes.json"
POLL_S = 0.25


@dataclass(frozen=True)
class Outcome:
    """How the children ended. `failed`: the first that did; `interrupted`: the signal that ended it."""

    failed: Child | None = None
    interrupted: signal.Signals | None = None

    @property
    def finished(self) -> bool:
        return self.failed is None and self.interrupted is None


def supervise(
    specs: Sequence[ChildSpec],
    *,
    run_dir: Path,
    stop_timeout_s: float,
    on_tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """Runs `specs` until the first of them exits; then stops the rest.

    After its exit with status 0 the others have `stop_timeout_s` to end by themselves. A status
    other than 0, of any child, is a failure. SIGINT and SIGTERM stop everything, a second one at once.
    """
    asked: list[signal.Signals] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(signal.Signals(number))

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    children: list[Child] = []
    try:
        for spec in specs:
            children.append(start(spec, logs=run_dir / "logs"))
            write_processes(run_dir, {child.name: child.process.pid for child in children})
        outcome = _watch(children, asked, on_tick)
        if outcome.finished:
            _wait(children, stop_timeout_s, asked, on_tick)
        return outcome
    finally:
        stop(children, timeout_s=stop_timeout_s, hurry=lambda: len(asked) > 1)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(children: list[Child], asked: list[signal.Signals], on_tick: Callable[[], None]) -> Outcome:
    while True:
        if asked:
            return Outcome(interrupted=asked[0])
        for child in children:
            if child.exit_code not in (None, 0):
                return Outcome(failed=child)
        if not children[0].running:
            return Outcome()
        on_tick()
        time.sleep(POLL_S)


def _wait(
    children: list[Child], timeout_s: float, asked: list[signal.Signals], on_tick: Callable[[], None]
) -> None:
    for pause in looks(timeout_s, POLL_S):
        if asked or not any(child.running for child in children):
            return
        on_tick()
        time.sleep(pause)


def stop(children: Sequence[Child], *, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """SIGTERM to each child alone, so that it stops its own children; SIGKILL to all after `timeout_s`."""
    for child in children:
        if child.running:
            os.kill(child.process.pid, signal.SIGTERM)
    for pause in looks(timeout_s, POLL_S / 5):
        if hurry() or not any(child.running for child in children):
            break
        time.sleep(pause)
    for child in children:
        if child.running:
            logger.warning("%s did not stop within %.0f s of SIGTERM: killing it", child.name, timeout_s)
        child.reap()


def write_processes(run_dir: Path, processes: dict[str, int]) -> None:
    """processes.json, replaced whole: a reader sees the old names or the new ones."""
    write_whole(run_dir / PROCESSES, json.dumps(processes, indent=2) + "\n")


def read_processes(run_dir: Path) -> dict[str, int]:
    """Name -> process id of the children started last; empty when none were."""
    try:
        text = (run_dir / PROCESSES).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return {str(name): int(pid) for name, pid in json.loads(text).items()}
