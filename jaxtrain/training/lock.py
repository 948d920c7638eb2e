"""One trainer a run directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jaxtrain.config import run_lock
from rollout_bridge.errors import ExpectedError
from sharding import processes


class RunInUse(ExpectedError):
    """Another trainer has the run's directory; the message names it and the remedy."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Process 0 holds the lock of the run meanwhile. All processes call it.

    Raises `RunInUse` in every process if another trainer holds it.
    """
    with ExitStack() as stack:
        problem = _take(run_dir, stack) if processes.process_index() == 0 else ""
        if problem := processes.broadcast_json(problem, name="the lock of the run"):
            raise RunInUse(problem)
        yield


def _take(run_dir: Path, stack: ExitStack) -> str:
    """What is wrong, "" with the lock taken."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / run_lock.TRAINER
    file = stack.enter_context(path.open("a+", encoding="utf-8"))
    if not run_lock.take(file):
        return (
            f"{run_dir}: {run_lock.holder(path)} trains this run. Stop it first, or give this run another "
            "name (--name)"
        )
    run_lock.sign(file)
    return ""
