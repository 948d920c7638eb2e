"""The whole ring in real processes, killed twice: nothing is lost, redone differently, or used twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxtrain.training.metrics import FILENAME, read_metrics
from rollout_bridge.store import Store
from rollout_bridge.trajectories.accounting import count
from rollout_bridge.trajectories.plan import plan_steps, read_plan
from rollout_bridge.weights.chain import read_latest, read_manifest
from rollout_bridge.weights.mirror_view import MirrorView
from rollout_bridge.weights.run import load as load_run

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
]


class Ring:
    """One run, started as often as needed with the same command."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "ring"
        self._command = [sys.executable, "-m", "jaxtrain", "quickstart"]
        self._command += ["--config", "configs/quickstart.yaml"]
        self._command += ["--name", "ring", f"runs_dir={directory}", *OVERRIDES]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def rl_rows(self) -> list[dict]:
        path = self.run_dir / FILENAME
        return read_metrics(path, phase="rl") if path.exists() else []

    def kill(self, process: subprocess.Popen[str], name: str, *, when: Callable[[], bool]) -> str:
        """`kill -9` of process `name` once `when` holds; what the command printed until it ended."""
        deadline = time.monotonic() + 240
        while not when():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"no sign of {name} being due to die"
            time.sleep(0.05)
        os.kill(json.loads((self.run_dir / "processes.json").read_text())[name], signal.SIGKILL)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 1, output
        return output


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    ring = Ring(tmp_path_factory.mktemp("runs"))
    said = ring.kill(ring.start(), "trainer", when=lambda: len(ring.rl_rows()) >= 2)
    assert "trainer: killed by SIGKILL" in said and "same command" in said
    said = ring.kill(ring.start(), "worker-0", when=lambda: len(ring.rl_rows()) >= 5)
    assert "worker-0: killed by SIGKILL" in said
    last = ring.start()
    output, _ = last.communicate(timeout=240)
    assert last.returncode == 0, output
    return ring


@pytest.fixture(scope="module")
def store(ring: Ring) -> Store:
    return Store.open(str(ring.run_dir / "store"))


def test_every_trajectory_is_accounted_for_once(store):
    counts = count(store)
    assert counts.adds_up and counts.twice == 0 and counts.missing == 0
    assert counts.trained > 0 and counts.plans == RL_STEPS


def test_versions_and_plans_go_on_without_gaps(ring, store):
    """One version a step after the first, each a child of the one before; three incarnations."""
    latest, run = read_latest(store), load_run(store)
    assert latest is not None and run is not None
    assert latest.version == RL_STEPS + 1 and run.incarnation == latest.incarnation == 3
    found, ref = [], latest.manifest
    while ref is not None:
        manifest = read_manifest(store, ref, run)
        found.append((manifest.version, manifest.step))
        ref = manifest.parent
    assert found[::-1] == [(v, WARM_STEPS + v - 1) for v in range(1, RL_STEPS + 2)]
    assert plan_steps(store) == list(range(RL_STEPS))
    assert [row["step"] for row in ring.rl_rows()] == [WARM_STEPS + k + 1 for k in range(RL_STEPS)]


def test_the_redo_reproduces_the_head_bit_for_bit(ring):
    log = (ring.run_dir / "logs" / "trainer.log").read_text()
    heads = [int(v) for v in re.findall(r"took over at version (\d+)", log)]
    assert heads[0] == 0 and heads == sorted(heads) and len(heads) == 3
    reproduced = re.findall(r"the redo of step \d+ reproduced version (\d+) exactly", log)
    assert [int(v) for v in reproduced] == heads[1:]


def test_training_is_asynchronous(store):
    """Tokens of earlier versions are trained on, as the plans recorded before each step say."""
    plans = [read_plan(store, step) for step in range(RL_STEPS)]
    lags = {p.version - v for p in plans if p is not None for row in p.rows for v, _ in row.version_counts}
    assert max(lags) >= 1


def test_the_engine_was_given_the_head_verified(ring, store):
    """The worker's mirror holds, tensor by tensor, what the head's manifest says."""
    latest, run = read_latest(store), load_run(store)
    assert latest is not None and latest.manifest is not None and run is not None
    manifest = read_manifest(store, latest.manifest, run)
    [mirror] = (ring.run_dir / "workers").glob("*/mirror")
    view = MirrorView.open(mirror)
    from rollout_bridge.quantization.digest import digest

    assert set(manifest.tensors) == set(run.tensors)
    for name, entry in manifest.tensors.items():
        assert digest(view.tensor(name)) == entry.digest_value, name


def test_summary_has_both_evaluations_at_exact_versions(ring, store):
    summary = json.loads((ring.run_dir / "summary.json").read_text())
    assert summary["restarts"] == 2 and summary["versions_published"] == RL_STEPS + 1
    assert summary["evaluated_versions"] == [1, RL_STEPS + 1]
    assert 0 <= summary["reward_before"] <= 1 and 0 <= summary["reward_after"] <= 1
    for key in store.list("evaluations/"):
        if key.endswith("result.json"):
            result = store.read_json(key)
            assert result is not None and result["count"] == PROMPTS and result["failed"] == 0


def test_a_finished_run_is_not_started_again(ring):
    before = (ring.run_dir / "logs" / "trainer.log").stat().st_size
    process = ring.start()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "is finished" in output
    assert (ring.run_dir / "logs" / "trainer.log").stat().st_size == before
