"""Threads that take the processor time that others leave."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor


def yielding_pool(threads: int, name: str, *, niceness: int) -> ThreadPoolExecutor:
    """A pool whose threads run at `niceness` (0 to 19, as nice(1) has it), if that is less than the caller's.

    Only on Linux, where a thread has a niceness of its own; lowering oneself needs no privileges there.
    """
    return ThreadPoolExecutor(threads, name, initializer=_lower, initargs=(niceness,))


def _lower(niceness: int) -> None:
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
