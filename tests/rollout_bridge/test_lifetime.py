"""A process ends with the one that started it, even when it ignores SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jaxtrain.quickstart.stand_ins import gone, wait_until

ROOT = Path(__file__).parents[2]

DEAF = """
import pathlib, signal, sys, time
from rollout_bridge.lifetime import follow_parent
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


BOUND = """
import os, pathlib, sys, time
from rollout_bridge.lifetime import end_with_parent
end_with_parent(int(os.environ["JAXTRAIN_PARENT_PID"]))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_the_kernel_ends_a_child_whose_parent_is_killed(tmp_path: Path) -> None:
    ends_with_its_parent(BOUND, tmp_path / "ready")


def test_a_child_whose_parent_has_gone_already_is_killed() -> None:
    code = "from rollout_bridge.lifetime import end_with_parent; end_with_parent(1 << 22); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")  # 1 << 22: past the largest process id


def test_a_deaf_child_is_killed_after_its_grace(tmp_path: Path) -> None:
    ends_with_its_parent(DEAF, tmp_path / "ready")


def ends_with_its_parent(program: str, ready: Path) -> None:
    """Starts `program` under a parent, kills the parent, and waits for the end of `program`."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, program, str(ready)], cwd=ROOT, stdout=subprocess.PIPE, text=True
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
