"""One child process with its own session and log, which ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_bridge import lifetime


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to start. `cores`: CPU indices it may use, empty for all. `environment`: added to the parent's."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Child:
    """A started process, its spec and its log."""

    spec: ChildSpec
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. Does not reap it: its id stays reserved."""
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def reap(self) -> None:
        """Sends SIGKILL to what is left of the process and those it started, then collects its exit status.

        Until collected its id cannot be given to another process, so the signal reaches no other group.
        """
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def describe_exit(self) -> str:
        """`exit status 1` or `killed by SIGKILL`."""
        status = self.exit_code
        if status is None:
            return "running"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"


def start(spec: ChildSpec, *, logs: Path) -> Child:
    """Start `spec` with stdout and stderr appended to logs/<name>.log.

    The child leads its own session, so that Ctrl-C in a terminal reaches only its parent. The kernel sends it
    SIGTERM when the parent ends, for any reason.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{spec.name}.log"
    parent = os.getpid()

    def before_exec() -> None:
        lifetime.end_with_parent(parent)
        if spec.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, spec.cores)

    with log.open("ab") as output:
        process = subprocess.Popen(
            list(spec.argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.environment},
            start_new_session=True,
            preexec_fn=before_exec,
        )
    return Child(spec, process, log)
