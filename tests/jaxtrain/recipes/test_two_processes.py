"""The sft recipe in two processes, weights and batch split over both, is the recipe in one.

A signal to either stops both after the same step, and one process alone goes on from what they saved.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.training.metrics import FILENAME, read_metrics
from tests.jaxtrain.recipes.test_supervised import ROOT, SMALL_MODEL
from tests.ports import held_port

pytestmark = pytest.mark.faults  # four starts of a trainer

STEPS = 4


def start(
    directory: Path, *, steps: int, processes: int = 1, port: int = 0, checkpoint_every: int = 2
) -> list[subprocess.Popen]:
    """The same command once a process, of several at `port`; two devices in all."""
    command = [sys.executable, "-m", "jaxtrain", "train", "--config", "configs/sft.yaml", SMALL_MODEL]
    command += [f"runs_dir={directory}", f"sft.steps={steps}", f"checkpoint.every_steps={checkpoint_every}"]
    command += ["environment.held_out_prompts=8", "batch={rows: 8, sequence_length: 32}"]
    command += ["sft.batch={start_tokens: 256, end_tokens: 1K, ramp_tokens: 1K}"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}",
    }
    if processes > 1:
        environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
    return [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"JAX_PROCESS_ID": str(index)} if processes > 1 else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]


def finish(running: list[subprocess.Popen], *, status: int = 0) -> None:
    try:
        outputs = [process.communicate(timeout=400)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == status, output


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("alone")
    finish(start(directory, steps=STEPS))
    return directory / "sft"


def test_two_processes_train_as_one(alone, tmp_path):
    with held_port() as port:
        finish(start(tmp_path, steps=STEPS, processes=2, port=port))
    rows = (tmp_path / "sft" / FILENAME).read_text().splitlines()
    assert len(rows) == STEPS  # written once
    for found, expected in zip(read_metrics(tmp_path / "sft"), read_metrics(alone), strict=True):
        assert found["tokens"] == expected["tokens"]
        assert found["recompilations"] == 0
        for name in ("loss", "balance_loss", "gradient_norm", "update_rms"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_a_signal_to_one_stops_both_and_one_process_goes_on(tmp_path):
    metrics = tmp_path / "sft" / FILENAME
    with held_port() as port:
        running = start(tmp_path, steps=10**6, processes=2, port=port, checkpoint_every=10**6)
        deadline = time.monotonic() + 300
        while not (metrics.exists() and read_metrics(metrics)):
            assert all(process.poll() is None for process in running), running[0].communicate()[0]
            assert time.monotonic() < deadline, "no step was made"
            time.sleep(0.1)
        running[1].send_signal(signal.SIGTERM)
        finish(running, status=130)
    stopped = read_metrics(metrics)[-1]["step"]
    finish(start(tmp_path, steps=stopped + 1, checkpoint_every=10**6))
    assert [row["step"] for row in read_metrics(metrics)] == list(range(1, stopped + 2))
