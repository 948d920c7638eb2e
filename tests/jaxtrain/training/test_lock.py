"""One trainer a run, whoever else is killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from jaxtrain.training.lock import LOCK, RunInUse, locked

HOLDER = """
import pathlib, sys, time
from jaxtrain.training.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_trainer_is_refused_by_name_until_the_first_is_gone(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunInUse, match=f"process {holder.pid} on .* trains this run"), locked(tmp_path):
            raise AssertionError("two train one run")
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        with locked(tmp_path):
            assert str(holder.pid) not in (tmp_path / LOCK).read_text()
        with locked(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()
