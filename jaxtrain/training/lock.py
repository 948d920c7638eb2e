"""One trainer a run directory. The lock is the kernel's, so it ends with its holder, however that dies."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rollout_bridge.errors import ExpectedError
from sharding import processes

log = logging.getLogger(__name__)

LOCK = "trainer.lock"


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
    file = stack.enter_context((run_dir / LOCK).open("a+", encoding="utf-8"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return (
            f"{run_dir}: {file.read().strip() or 'another process'} trains this run. Stop it first, or give "
            "this run another name (--name)"
        )
    except OSError as error:
        log.warning(
            "%s: no lock (%s), so a second trainer of this run is not noticed", file.name, error.strerror
        )
        return ""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return ""
