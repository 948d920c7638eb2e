"""A composed command ends with the process that composed it, even when it does not listen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.jaxtrain.quickstart.stand_ins import gone, wait_until

ROOT = Path(__file__).parents[3]

DEAF = """
import pathlib, signal, sys, time
from jaxtrain.commands.lifetime import follow_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)
follow_parent()
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""

PARENT = """
import os, subprocess, sys, time
environment = os.environ | {"JAXTRAIN_PARENT_PID": str(os.getpid()), "JAXTRAIN_PARENT_GRACE_S": "0.1"}
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=environment, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_deaf_child_is_killed_after_its_grace(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, DEAF, str(ready)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        wait_until(ready.exists, "the start of the child")
        parent.kill()
        parent.wait()
        wait_until(lambda: gone(child), "the end of the child")
    finally:
        parent.kill()
        if not gone(child):
            os.kill(child, signal.SIGKILL)
