"""A process that ends with the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT = "JAXTRAIN_PARENT_PID"
GRACE = "JAXTRAIN_PARENT_GRACE_S"
POLL_S = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # no dlopen after a fork


def end_with_parent(parent: int, *, by: signal.Signals = signal.SIGTERM) -> None:
    """The kernel sends this process `by` when its parent dies (Linux; kept across exec, not across fork).

    parent: its process id. If it has died already, this process is killed at once. May run between fork and
    exec.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def follow_parent() -> None:
    """Watch the parent named by `JAXTRAIN_PARENT_PID` and end when it does; without that, do nothing.

    SIGTERM comes first. A process that is still there `JAXTRAIN_PARENT_GRACE_S` seconds later is killed with
    its process group.
    """
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    grace_s = float(os.environ.get(GRACE, "30"))

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()
