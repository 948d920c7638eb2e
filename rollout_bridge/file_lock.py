"""One writer at a time for each key of a directory, among all threads, processes and hosts that mount it.

The locks are the operating system's, on files that are made once and never removed. A process that dies, by
`kill -9` too, loses its locks at once, and what it left behind means nothing to the next holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import zlib
from collections.abc import Callable

from rollout_bridge.waiting import looks

DIRECTORY = ".locks"  # no key of a store starts with a dot
_FILES = 256  # keys share them, so that their number does not grow with the run
_FIRST_POLL, _SLOWEST_POLL = 5e-5, 0.02  # seconds; a write of a small value takes less than a millisecond


def acquire(
    root: str, key: str, *, timeout: float, sleep: Callable[[float], None] = time.sleep
) -> Callable[[], None]:
    """Locks `key` below `root`; returns the function that unlocks it, which any thread may call, twice too.

    Raises TimeoutError after `timeout` seconds, OSError if the directory cannot be written to.
    """
    directory = os.path.join(root, DIRECTORY)
    path = os.path.join(directory, f"{zlib.crc32(key.encode()) % _FILES:02x}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        os.makedirs(directory, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        for pause in looks(timeout, _FIRST_POLL, slowest=_SLOWEST_POLL):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return _once(descriptor)
            sleep(pause)
        raise TimeoutError(f"{path} is locked by another writer")
    except BaseException:
        os.close(descriptor)
        raise


def _once(descriptor: int) -> Callable[[], None]:
    held, guard = [descriptor], threading.Lock()

    def release() -> None:
        with guard:
            if held:
                fcntl.flock(held[0], fcntl.LOCK_UN)  # before the close: a forked child may hold the file open
                os.close(held.pop())

    return release
