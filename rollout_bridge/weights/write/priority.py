"""Threads and processes of lower priority than the training step."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

from rollout_bridge.weights.read import parallel


def yielding_pool(threads: int, name: str, *, niceness: int) -> ThreadPoolExecutor:
    """A pool whose threads run at `niceness` (0 to 19, as in nice(1)), or at the caller's if that is higher.

    Only on Linux, where each thread has its own niceness and may raise it without privileges.
    """
    return ThreadPoolExecutor(threads, name, initializer=_lower, initargs=(niceness,))


def yielding_processes(count: int, *, niceness: int) -> ProcessPoolExecutor:
    """The same with processes, which also leave the caller's interpreter free, and end with it."""
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
