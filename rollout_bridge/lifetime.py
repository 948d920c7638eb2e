"""A composed process does not outlive the one that composed it."""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT = "JAXTRAIN_PARENT_PID"
GRACE = "JAXTRAIN_PARENT_GRACE_S"
POLL_S = 1.0


def follow_parent() -> None:
    """If we were composed by another process, end when it does.

    SIGTERM comes first; a process that has not left `JAXTRAIN_PARENT_GRACE_S` seconds later is killed with
    everything it started. Does nothing for a command started by hand.
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
