"""The main job, small, in real processes that tests may kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from jaxtrain.training.metrics import FILENAME, read_metrics
from rollout_bridge.store import Store
from rollout_bridge.weights.format.chain import read_latest
from rollout_bridge.weights.format.manifest import Latest
from tests.running import stopped

ROOT = Path(__file__).parents[3]
RL_STEPS, WARM_STEPS, PROMPTS = 10, 4, 24
OVERRIDES = [
    f"rl.steps={RL_STEPS}",
    f"warm_start.steps={WARM_STEPS}",
    f"evaluation.prompts={PROMPTS}",
    "checkpoint.every_steps=3",
    "rollouts.lease_seconds=5",
    "batch.rows=16",
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.head_dim=32",
    "model.intermediate_size=128",
    "warm_start.batch={start_tokens: 1024, end_tokens: 1024}",
    "rl.batch={start_tokens: 1024, end_tokens: 2048, ramp_tokens: 4096}",
    "rollouts.segment_groups=2",
    "rollouts.flush_seconds=0.5",
    "processes.stop_timeout_s=300",  # a process that is asked to stop does so, on whatever machine
]


class Ring:
    """One run, started as often as needed with the same command."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "ring"
        self._command = [sys.executable, "-m", "jaxtrain", "quickstart"]
        self._command += ["--config", "configs/quickstart.yaml"]
        self._command += ["--name", "ring", f"runs_dir={directory}", *OVERRIDES]

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *more],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def rl_rows(self) -> list[dict]:
        path = self.run_dir / FILENAME
        return read_metrics(path, phase="rl") if path.exists() else []

    def head(self) -> Latest | None:
        """None before the first version."""
        latest = read_latest(Store.open(str(self.run_dir / "store"), probe=False))
        return None if latest is None or latest.manifest is None else latest

    def checkpoint(self) -> int:
        """Step that a start would restore; -1 if none."""
        names = [path.name for path in (self.run_dir / "checkpoints").iterdir()]
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def overtaken(self) -> int:
        """Publications that a later one replaced, over all starts of the trainer."""
        starts = [0]
        for line in (self.run_dir / FILENAME).read_text().splitlines():
            row = json.loads(line)
            if "restored_step" in row:
                starts.append(0)
            starts[-1] = max(starts[-1], row.get("versions_overtaken") or 0)
        return sum(starts)

    def wait(self, process: subprocess.Popen[str], when: Callable[[], bool]) -> None:
        """Until `when` holds, while the command runs."""
        deadline = time.monotonic() + 600
        while not when():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the run does not come to the awaited point"
            time.sleep(0.05)

    def kill(self, process: subprocess.Popen[str], name: str, *, when: Callable[[], bool]) -> str:
        """`kill -9` of process `name` at a moment when `when` holds; what the command printed until it ended.

        The process stands still while `when` is asked again, so that it cannot go on between look and kill.
        """
        while True:
            self.wait(process, when)
            victim = psutil.Process(json.loads((self.run_dir / "processes.json").read_text())[name])
            victim.suspend()
            self.wait(process, lambda pid=victim.pid: stopped(pid))
            if when():
                break
            victim.resume()
        victim.kill()
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 1, output
        return output
