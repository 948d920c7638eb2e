"""The locks of a run's directory. They are the kernel's (flock): each ends with its holder, always."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

TRAINER, QUICKSTART = "trainer.lock", "quickstart.lock"
_HOLDER = re.compile(r"process (\d+) on (.+)")


def take(file: TextIO, *, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file; False if another holds it. True too where the file system has no locks, with a
    warning.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "%s: no lock (%s), so a second process that owns this run is not noticed",
            file.name,
            error.strerror,
        )
    return True


def sign(file: TextIO) -> None:
    """Writes who holds the lock."""
    file.truncate(0)
    file.write(f"{this_process()}\n")
    file.flush()


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def holder(path: Path) -> str:
    """Who holds the lock, as it has signed."""
    return path.read_text(encoding="utf-8").strip() or "another process"


def local_pid(path: Path) -> int | None:
    """The process that has signed the lock, if it is of this host."""
    signed = _HOLDER.fullmatch(holder(path))
    return int(signed[1]) if signed and signed[2] == socket.gethostname() else None


def held_by_another(run_dir: Path) -> str:
    """Who holds a lock of the run, "" if no process but this one does."""
    for path in (run_dir / TRAINER, run_dir / QUICKSTART):
        if path.is_file():
            with path.open(encoding="utf-8") as file:  # closed at once, which ends a lock taken here
                if not take(file, kind=fcntl.LOCK_SH) and holder(path) != this_process():
                    return holder(path)
    return ""
