"""Directories of a run's checkpoints, one a step. Imports no jax."""

from __future__ import annotations

import logging
import os
import time

from etils import epath

log = logging.getLogger(__name__)


def saved_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Steps with a finished checkpoint, ascending."""
    path = epath.Path(directory)
    if not path.exists():
        return []
    return sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdecimal())


def rename_later(directory: str | os.PathLike[str], *, after: int) -> list[int]:
    """Renames the checkpoints of later steps, so that training can save these steps again; deletes nothing.

    Another process may do the same at the same time.
    """
    later = [step for step in saved_steps(directory) if step > after]
    for step in later:
        source = epath.Path(directory) / str(step)
        target = source.parent / f"unused-{step}-{time.time_ns()}"
        try:
            source.rename(target)
        except OSError:
            if source.exists():
                raise
        else:
            log.warning(
                "%s is later than step %d, where training goes on: it is now %s", source, after, target
            )
    return later
