"""Real small processes to compose in place of trainer and workers; as a program, a supervisor of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from jaxtrain.quickstart.child import ChildSpec
from jaxtrain.quickstart.supervisor import supervise
from jaxtrain.quickstart.takeover import owned

PATIENCE_S = 120.0  # for what takes a moment, on a machine that stalls

# Says it is ready, works until SIGTERM, then leaves a mark that it stopped by itself.
OBEDIENT = """
import pathlib, signal, sys, time
run, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def stop(*_):
    (run / f"{name}.clean").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(run / f"{name}.ready").touch()
time.sleep(600)
"""

# The same, but leaves by itself once the run is over.
LEAVING = OBEDIENT.replace(
    "time.sleep(600)",
    """while not (run / "over").exists():
    time.sleep(0.02)
(run / f"{name}.left").touch()""",
)

STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(pathlib.Path(sys.argv[1]) / f"{sys.argv[2]}.ready").touch()
time.sleep(600)
"""

# Starts a process of its own, in its group, and says which.
PARENT = """
import pathlib, subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
run = pathlib.Path(sys.argv[1])
(run / "inner.partial").write_text(str(inner.pid))
(run / "inner.partial").rename(run / "inner.pid")
(run / f"{sys.argv[2]}.ready").touch()
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """No such process, or only its exit status is left."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def spec(name: str, run_dir: Path, program: str) -> ChildSpec:
    return ChildSpec(name=name, argv=(sys.executable, "-c", program, str(run_dir), name))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)


if __name__ == "__main__":
    directory, *names = sys.argv[1:]
    run = Path(directory)
    with owned(run, stop_timeout_s=PATIENCE_S, replace=True) as stopped:
        (run / "stopped").write_text(" ".join(sorted(stopped)))
        specs = [spec(name, run, OBEDIENT) for name in names]
        outcome = supervise(specs, run_dir=run, stop_timeout_s=PATIENCE_S)
    sys.exit(128 + outcome.interrupted if outcome.interrupted else int(not outcome.finished))
