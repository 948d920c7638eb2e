"""Which cores each process of a run may use.

On a small machine an unpinned trainer and engine start a thread a core each and preempt each other in every
matrix product; on disjoint cores they do not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def available_cores() -> tuple[int, ...]:
    """CPU indices this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def split(cores: Sequence[int], *, trainer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(cores of the trainer, cores of everything else). `trainer` 0 takes half, the odd one too.

    With a single core, or a `trainer` that leaves none, both get all.
    """
    wanted = trainer or (len(cores) + 1) // 2
    if len(cores) < 2 or wanted >= len(cores):
        return tuple(cores), tuple(cores)
    return tuple(cores[:wanted]), tuple(cores[wanted:])


def thread_environment(cores: Sequence[int]) -> dict[str, str]:
    """Variables that keep BLAS and OpenMP pools to the number of cores they are pinned to."""
    count = str(len(cores))
    return {"OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, "MKL_NUM_THREADS": count}
