"""The examples in whole runs: trainer, store and rollout worker, each a process of `jaxtrain quickstart`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.load import load_config
from jaxtrain.config.references import build
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.packing import pack
from jaxtrain.data.sources.plans import document
from jaxtrain.training.metrics import read_metrics
from rollout_bridge.store import Store
from rollout_bridge.trajectories.accounting import count
from rollout_bridge.trajectories.plan import Plan, Row, load_rows, read_plan
from rollout_bridge.trajectories.schema import Status
from tests.extending.examples import EXAMPLES, jaxtrain
from tests.extending.test_reinforcement import documents_in

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Trained:
    """What one RL step trained on."""

    plan: Plan
    rows: list[Row]


def trained(name: str, directory: Path, *overrides: str) -> tuple[AsyncGrpoConfig, Path, list[Trained]]:
    """A run of the example's config: its config, its directory, and what each RL step trained on."""
    source = EXAMPLES / f"{name}.yaml"
    jaxtrain("quickstart", "--config", source, f"runs_dir={directory}", *overrides, here=directory)
    config = load_config(source, [f"runs_dir={directory}", *overrides])
    assert isinstance(config, AsyncGrpoConfig)
    store = Store.open(config.store_url, probe=False)
    counts = count(store)
    assert counts.adds_up and counts.plans == config.rl.steps
    plans = [read_plan(store, step) for step in range(config.rl.steps)]
    return config, config.run_dir, [Trained(plan, load_rows(store, plan, {})) for plan in plans if plan]


def test_a_loss_an_advantage_a_filter_and_an_environment(tmp_path):
    """The threshold is near the median reward of a policy that has begun, so some groups are too easy."""
    filters = "trajectories.filters=[no_signal, {name: 'too_easy:TooEasy', above: -0.065}]"
    config, run_dir, steps = trained("gspo", tmp_path, filters)
    rows = read_metrics(run_dir, phase="rl")
    assert len(rows) == config.rl.steps
    for row in rows:
        assert row["sequence_ratio"] > 0 and 0 <= row["clipped_fraction"] <= 1
        assert row["weight"] == pytest.approx(row["trajectories"], abs=0.01)
    assert any(step.plan.drops.get("too_easy") for step in steps)

    advantage = build("advantage", config.rl.advantage, where="rl.advantage")
    loss = build("loss", config.rl.loss, where="rl.loss")
    for step in steps:
        assert {name for row in step.rows for name in row.trajectory.rewards} == {"right", "length"}
        documents = [document(row, advantage, config.rl.average) for row in step.rows]
        batch = pack(documents, rows=16, sequence_length=64, columns=loss.columns)
        several = 0
        for where in documents_in(batch):
            advantages = np.asarray(batch["advantages"])[where & (np.asarray(batch.loss_weights) > 0)]
            np.testing.assert_allclose(advantages[:-1] / advantages[1:], 0.98, rtol=1e-5)
            several += len(advantages) > 1
        assert several


def test_an_environment_with_a_tool(tmp_path):
    """Groups without signal are dropped, so each trained one has a trajectory that used the calculator."""
    _, run_dir, steps = trained("calculator", tmp_path)
    assert [row["phase"] for row in read_metrics(run_dir)] == ["rl"] * 2
    used = [row for step in steps for row in step.rows if row.trajectory.rewards["used"]]
    assert used
    for row in used:
        turns = row.trajectory.turns
        assert [turn.kind.value for turn in turns] == ["prompt", "model", "tool", "model"]
        for turn in turns:
            assert (row.mask[turn.start : turn.end] == (turn.kind.value == "model")).all()
    assert {row.trajectory.status for step in steps for row in step.rows} == {Status.OK}
