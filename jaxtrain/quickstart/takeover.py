"""At most one supervisor a run. A new one is refused, or stops the one before if that is asked for.

The lock is the kernel's (flock), so it ends with its holder. Children that are left over are identified by
process id *and* command line, so another process with a reused id is not touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil

from jaxtrain.config import run_lock
from jaxtrain.quickstart.supervisor import read_processes
from rollout_bridge.errors import ExpectedError
from rollout_bridge.waiting import looks

logger = logging.getLogger(__name__)

POLL_S = 0.1


class TakeoverError(ExpectedError):
    """Another supervisor of the same run cannot be stopped."""


@contextmanager
def owned(run_dir: Path, *, stop_timeout_s: float, replace: bool = False) -> Iterator[list[str]]:
    """Locks the run. Yields the names of the processes that were stopped first: those that a supervisor left
    which is gone, and with `replace` a supervisor that runs.

    Raises `TakeoverError` if one runs, or survives SIGTERM for twice `stop_timeout_s` and then SIGKILL.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / run_lock.QUICKSTART
    with path.open("a+", encoding="utf-8") as lock:
        if not replace and not run_lock.take(lock):
            raise TakeoverError(
                f"{run_dir}: {run_lock.holder(path)} runs this already. Look at it with jaxtrain report, "
                "stop it with Ctrl-C there, give this run another --name, or take it over by --replace"
            )
        stopped = _stop_holder(lock, path, stop_timeout_s)
        run_lock.sign(lock)
        stopped += stop_survivors(run_dir, stop_timeout_s=stop_timeout_s)
        yield stopped


def stop_survivors(run_dir: Path, *, stop_timeout_s: float) -> list[str]:
    """Stop children named in processes.json that are still this run's. Returns their names."""
    alive = {
        name: process
        for name, pid in read_processes(run_dir).items()
        if (process := _of_run(pid, run_dir)) is not None
    }
    everyone = [relative for process in alive.values() for relative in (process, *_descendants(process))]
    for name, process in alive.items():
        logger.warning("stopping %s (pid %d), left by an earlier invocation", name, process.pid)
        _signal(process, kill=False)
    _, remaining = psutil.wait_procs(everyone, timeout=stop_timeout_s)
    for process in remaining:
        _signal(process, kill=True)
    psutil.wait_procs(remaining, timeout=stop_timeout_s)
    return list(alive)


def _of_run(pid: int, run_dir: Path) -> psutil.Process | None:
    """The process, if its command line names this run's directory."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        inside = any(str(run_dir) in argument for argument in process.cmdline())
    except psutil.Error:
        return None
    return process if inside else None


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return


def _stop_holder(lock: TextIO, path: Path, stop_timeout_s: float) -> list[str]:
    if run_lock.take(lock):
        return []
    stopped: list[str] = []
    for kill in (False, True):
        signalled: set[psutil.Process] = set()
        for pause in looks(2 * stop_timeout_s, POLL_S):
            if run_lock.take(lock):
                return stopped
            holder = _holder(path)
            if holder is not None and holder not in signalled:
                logger.warning("stopping the quickstart (pid %d) that runs this already", holder.pid)
                _signal(holder, kill=kill)
                signalled.add(holder)
                stopped = ["quickstart"]
            time.sleep(pause)
    raise TakeoverError(
        f"{path}: still locked by {run_lock.holder(path)}, which SIGTERM and SIGKILL from here did not end; "
        "stop that process, then run again"
    )


def _holder(path: Path) -> psutil.Process | None:
    """The process that the file names, if it is of this host and has the file open.

    A new holder writes its name a moment after it gets the lock. Until then the file names an earlier holder,
    whose id may belong to another process by now.
    """
    pid = run_lock.local_pid(path)
    try:
        process = None if pid is None else psutil.Process(pid)
        opened = [] if process is None else [file.path for file in process.open_files()]
    except psutil.Error:
        return None
    return process if str(path.resolve()) in opened else None
