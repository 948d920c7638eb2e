"""Composition of processes: what becomes of the others when one ends, dies, or someone asks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxtrain.quickstart import supervisor, takeover
from jaxtrain.quickstart.supervisor import read_processes, supervise, write_processes
from jaxtrain.quickstart.takeover import owned, stop_survivors
from tests.jaxtrain.quickstart.stand_ins import (
    LEAVING,
    OBEDIENT,
    PARENT,
    PATIENCE_S,
    STUBBORN,
    gone,
    spec,
    wait_until,
)

ROOT = Path(__file__).parents[3]


def when_ready(run: Path, name: str, action: str) -> str:
    """A program that does `action` once `name` is ready."""
    return (
        "import os, pathlib, signal, sys, time\n"
        f"while not (pathlib.Path(sys.argv[1]) / '{name}.ready').exists(): time.sleep(0.02)\n"
        f"print('acting', flush=True)\n{action}\n"
    )


def test_the_first_process_ends_the_run_and_the_rest_is_stopped_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(supervisor, "_wait", lambda _children, seconds, *_: waited.append(seconds))
    trainer = spec("trainer", tmp_path, when_ready(tmp_path, "worker-0", "sys.exit(0)"))
    worker = spec("worker-0", tmp_path, OBEDIENT)
    outcome = supervise([trainer, worker], run_dir=tmp_path, stop_timeout_s=PATIENCE_S)
    assert outcome.finished
    assert (tmp_path / "worker-0.clean").exists()
    assert waited == [PATIENCE_S]  # for it to leave by itself
    assert list(read_processes(tmp_path)) == ["trainer", "worker-0"]
    assert all(gone(pid) for pid in read_processes(tmp_path).values())
    assert (tmp_path / "logs/trainer.log").read_text() == "acting\n"


def test_after_the_first_process_the_rest_may_leave_by_itself(tmp_path: Path) -> None:
    trainer = spec("trainer", tmp_path, when_ready(tmp_path, "worker-0", "sys.exit(0)"))
    worker = spec("worker-0", tmp_path, LEAVING)

    def tick() -> None:
        if gone(read_processes(tmp_path)["trainer"]):
            (tmp_path / "over").touch()

    outcome = supervise([trainer, worker], run_dir=tmp_path, stop_timeout_s=PATIENCE_S, on_tick=tick)
    assert outcome.finished
    assert (tmp_path / "worker-0.left").exists() and not (tmp_path / "worker-0.clean").exists()


@pytest.mark.parametrize(
    ("action", "described"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"), ("sys.exit(3)", "exit status 3")],
)
def test_a_death_is_named_and_stops_the_others_cleanly(tmp_path: Path, action: str, described: str) -> None:
    worker = spec("worker-0", tmp_path, when_ready(tmp_path, "trainer", action))
    outcome = supervise(
        [spec("trainer", tmp_path, OBEDIENT), worker], run_dir=tmp_path, stop_timeout_s=PATIENCE_S
    )
    assert outcome.failed is not None
    assert (outcome.failed.name, outcome.failed.describe_exit()) == ("worker-0", described)
    assert outcome.failed.log == tmp_path / "logs/worker-0.log"
    assert (tmp_path / "trainer.clean").exists()


def test_a_process_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    trainer = spec("trainer", tmp_path, when_ready(tmp_path, "worker-0", "sys.exit(1)"))
    supervise([trainer, spec("worker-0", tmp_path, STUBBORN)], run_dir=tmp_path, stop_timeout_s=0.5)
    assert gone(read_processes(tmp_path)["worker-0"])


def test_what_a_dead_process_started_goes_with_it(tmp_path: Path) -> None:
    parent = spec("server-0", tmp_path, PARENT)
    trainer = spec("trainer", tmp_path, when_ready(tmp_path, "server-0", "sys.exit(1)"))
    supervise([trainer, parent], run_dir=tmp_path, stop_timeout_s=PATIENCE_S)
    inner = int((tmp_path / "inner.pid").read_text())
    wait_until(lambda: gone(inner), "the end of the inner process")


@pytest.fixture
def start_supervisor(tmp_path: Path) -> Iterator[object]:
    """Starts supervisors of obedient stand-ins as real processes; kills what a failing test left."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*names: str) -> subprocess.Popen[bytes]:
        before = read_processes(tmp_path)
        for name in names:
            for mark in ("ready", "clean"):
                (tmp_path / f"{name}.{mark}").unlink(missing_ok=True)

        def written() -> bool:
            now = read_processes(tmp_path)
            return now.keys() == set(names) and set(now.values()).isdisjoint(before.values())

        process = subprocess.Popen(
            [sys.executable, "-m", "tests.jaxtrain.quickstart.stand_ins", str(tmp_path), *names], cwd=ROOT
        )
        started.append(process)
        for name in names:
            wait_until((tmp_path / f"{name}.ready").exists, f"the start of {name}")
        wait_until(written, "the list of processes")  # a child may be ready before its supervisor goes on
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
    stop_survivors(tmp_path, stop_timeout_s=PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything_cleanly(
    tmp_path: Path, start_supervisor, number: signal.Signals
) -> None:
    running = start_supervisor("trainer", "worker-0")
    running.send_signal(number)
    assert running.wait(timeout=300) == 128 + number
    assert (tmp_path / "trainer.clean").exists()
    assert (tmp_path / "worker-0.clean").exists()


def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path, start_supervisor) -> None:
    running = start_supervisor("trainer", "worker-0")
    children = read_processes(tmp_path)
    running.kill()
    for name, pid in children.items():
        wait_until(lambda pid=pid: gone(pid), f"the end of {name}")


def test_a_second_invocation_takes_the_run_over(tmp_path: Path, start_supervisor) -> None:
    first = start_supervisor("trainer", "worker-0")
    before = read_processes(tmp_path)
    second = start_supervisor("trainer", "worker-0")
    assert first.wait(timeout=300) == 128 + signal.SIGTERM
    assert all(gone(pid) for pid in before.values())
    assert second.poll() is None
    assert (tmp_path / "stopped").read_text() == "quickstart"
    assert set(before.values()).isdisjoint(read_processes(tmp_path).values())


# Has the lock, and says so once it may: as between taking the lock and writing who did.
HOLDER = """
import fcntl, pathlib, sys, time
from jaxtrain.config.run_lock import sign
run = pathlib.Path(sys.argv[1])
with (run / "quickstart.lock").open("a+") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    (run / "held").touch()
    while not (run / "told").exists():
        time.sleep(0.02)
    sign(lock)
    time.sleep(600)
"""


def test_a_holder_that_has_not_said_so_yet_is_stopped_and_not_who_was_named_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recycled = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (tmp_path / "quickstart.lock").write_text(f"process {recycled.pid} on {socket.gethostname()}")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)])
    look = takeover._holder

    def look_then_tell(path: Path) -> object:
        """The holder says who it is after the first look, and not before."""
        found = look(path)
        (tmp_path / "told").touch()
        return found

    monkeypatch.setattr(takeover, "_holder", look_then_tell)
    try:
        wait_until((tmp_path / "held").exists, "the lock of the holder")
        with (
            pytest.raises(takeover.TakeoverError, match="runs this already"),
            owned(tmp_path, stop_timeout_s=PATIENCE_S),
        ):
            raise AssertionError("two own the run")
        with owned(tmp_path, stop_timeout_s=PATIENCE_S, replace=True) as stopped:
            assert stopped == ["quickstart"]
            assert (tmp_path / "quickstart.lock").read_text().startswith(f"process {os.getpid()} on ")
        assert holder.wait(timeout=300) == -signal.SIGTERM
        assert recycled.poll() is None
    finally:
        for process in (holder, recycled):
            process.kill()
            process.wait()


def test_survivors_are_stopped_only_if_they_are_this_runs(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    mine = subprocess.Popen([sys.executable, "-c", OBEDIENT, str(run), "trainer"])
    recycled = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        wait_until((run / "trainer.ready").exists, "the start of the survivor")
        write_processes(run, {"trainer": mine.pid, "worker-0": recycled.pid, "worker-1": os.getpid()})
        with owned(run, stop_timeout_s=PATIENCE_S) as stopped:
            assert stopped == ["trainer"]
        assert mine.wait(timeout=300) == 0
        assert (run / "trainer.clean").exists()
        assert recycled.poll() is None
    finally:
        for process in (mine, recycled):
            process.kill()
            process.wait()
