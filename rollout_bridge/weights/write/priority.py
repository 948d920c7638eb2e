"""Threads and processes that take the processor time that others leave."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

from rollout_bridge.weights.read import parallel


def yielding_pool(threads: int, name: str, *, niceness: int) -> ThreadPoolExecutor:
    """A pool whose threads run at `niceness` (0 to 19, as nice(1) has it), if that is less than the caller's.

    Only on Linux, where a thread has a niceness of its own; lowering oneself needs no privileges there.
    """
    return ThreadPoolExecutor(threads, name, initializer=_lower, initargs=(niceness,))


def yielding_processes(count: int, *, niceness: int) -> ProcessPoolExecutor:
    """The same of processes, which take no time of the caller's interpreter either and end with it."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawn, initializer=_begin, initargs=(niceness,))


def _begin(niceness: int) -> None:
    parallel.begin()
    _lower(niceness)


def _lower(niceness: int) -> None:
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
