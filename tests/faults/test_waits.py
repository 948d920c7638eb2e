"""SIGTERM to one of two trainer processes, in each of their waits: both end soon, with a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_bridge.store import Store
from tests.jaxtrain.recipes.ring import ROOT
from tests.ports import held_port

pytestmark = pytest.mark.faults

SECONDS = 10.0
START, STOPPED = 400.0, 130
STEPS = 2
OVERRIDES = [
    f"warm_start.steps={STEPS}",
    "evaluation.prompts=8",
    "checkpoint.every_steps=1000",
    "environment.held_out_prompts=8",
    "batch={rows: 8, sequence_length: 64}",
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.head_dim=32",
    "model.intermediate_size=128",
    "warm_start.batch={start_tokens: 512, end_tokens: 512}",
    "rl.batch={start_tokens: 512, end_tokens: 512, ramp_tokens: 0}",
]


class Trainer:
    """Two processes of one device each, with no worker. away: what the keys contain that can go away."""

    def __init__(self, directory: Path, port: int, *more: str, away: str, only: int | None = None) -> None:
        self.flag, self.run_dir = directory / "away", directory / "waits"
        self.logs = [directory / f"trainer-{index}.log" for index in range(2)]
        command = [sys.executable, "-m", "tests.faults.waits_program", str(self.flag), away, "train"]
        command += ["--config", "configs/quickstart.yaml", "--name", "waits", f"runs_dir={directory}"]
        self.processes = [
            subprocess.Popen(
                [*command, *OVERRIDES, *more],
                cwd=ROOT,
                env=os.environ
                | {
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
                    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                    "JAX_NUM_PROCESSES": "2",
                    "JAX_PROCESS_ID": str(index),
                },
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for index, log in enumerate(self.logs)
            if only in (None, index)
        ]

    def until(self, what: str, condition) -> None:
        deadline = time.monotonic() + START
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.output()
            assert time.monotonic() < deadline, f"no {what}: {self.output()}"
            time.sleep(0.1)

    def says(self, text: str) -> bool:
        return any(text in log.read_text() for log in self.logs if log.exists())

    def output(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in self.logs if log.exists())

    def stop(self, index: int) -> float:
        """Seconds from SIGTERM to process `index` until all have ended."""
        began = time.monotonic()
        self.processes[index].send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(200)
        return time.monotonic() - began

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def has(run_dir: Path, key: str) -> bool:
    return (run_dir / "store" / key).exists()


# What may go away, when it does and what is waited for then, with the key that shows that it is time.
WAITS = {
    "data": ("nothing", (), "control/evaluations/rl-000000-v1.json"),
    "store": ("", (), "control/evaluations/rl-000000-v1.json"),
    "plans": ("plans/", (), "control/evaluations/rl-000000-v1.json"),
    "answers": ("nothing", ("rl.steps=0",), "control/evaluations/rl-000000-v1.json"),
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("wait", WAITS)
def test_a_signal_in_a_wait_stops_both_with_a_checkpoint(wait, index, tmp_path, record_property) -> None:
    away, more, key = WAITS[wait]
    with held_port() as port:
        trainer = Trainer(tmp_path, port, *more, away=away)
    try:
        trainer.until(key, lambda: has(trainer.run_dir, key))
        if wait in ("store", "plans"):
            trainer.flag.touch()
            trainer.until("retry", lambda: trainer.says("Trying again for up to"))
        time.sleep(2)  # both are in the wait
        seconds = trainer.stop(index)
        assert [process.returncode for process in trainer.processes] == [STOPPED] * 2, trainer.output()
        assert (trainer.run_dir / "checkpoints" / str(STEPS)).is_dir(), trainer.output()
        record_property("outcome", f"both ended in {seconds:.1f} s")
        assert seconds <= SECONDS
    finally:
        trainer.kill()


@pytest.mark.parametrize("index", [0, 1])
def test_a_signal_while_a_version_waits_for_its_parts(index, tmp_path, record_property) -> None:
    """Neither process can write its part of version 1, and each waits for the other's."""
    with held_port() as port:
        trainer = Trainer(tmp_path, port, away="weights/versions")
    try:
        trainer.flag.touch()
        trainer.until("retry", lambda: trainer.says("Trying again for up to"))
        time.sleep(2)
        seconds = trainer.stop(index)
        assert [process.returncode for process in trainer.processes] == [STOPPED] * 2, trainer.output()
        assert (trainer.run_dir / "checkpoints" / str(STEPS)).is_dir(), trainer.output()
        record_property("outcome", f"both ended in {seconds:.1f} s")
        assert seconds <= SECONDS
    finally:
        trainer.kill()


def test_a_signal_while_one_waits_for_the_other_to_join(tmp_path, record_property) -> None:
    with held_port() as port:
        trainer = Trainer(tmp_path, port, away="nothing", only=0)
    try:
        trainer.until("join", lambda: trainer.says("joins"))
        seconds = trainer.stop(0)
        record_property("outcome", f"ended in {seconds:.1f} s")
        assert seconds <= SECONDS
    finally:
        trainer.kill()


def test_a_store_that_is_away_for_longer_than_a_call_may_take_is_waited_for(
    tmp_path, record_property
) -> None:
    with held_port() as port:
        trainer = Trainer(tmp_path, port, away="")
    try:
        key = "control/evaluations/rl-000000-v1.json"
        trainer.until(key, lambda: has(trainer.run_dir, key))
        trainer.flag.touch()
        away = time.monotonic()
        trainer.until("long outage", lambda: time.monotonic() > away + 70)
        trainer.flag.unlink()
        trainer.until("return", lambda: trainer.says("is back"))
        assert Store.open(str(trainer.run_dir / "store")).read(key) is not None
        record_property("outcome", "went on after 70 s")
        assert trainer.stop(0) <= SECONDS
        assert [process.returncode for process in trainer.processes] == [STOPPED] * 2, trainer.output()
    finally:
        trainer.kill()
