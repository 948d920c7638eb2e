"""The whole ring in real processes, killed twice: nothing is lost, redone differently, or used twice."""

from __future__ import annotations

import json
import re

import pytest

from rollout_bridge.store import Store
from rollout_bridge.trajectories.accounting import count
from rollout_bridge.trajectories.plan import plan_steps, read_plan
from rollout_bridge.weights.format.chain import read_latest, read_manifest
from rollout_bridge.weights.format.run import load as load_run
from rollout_bridge.weights.read.mirror_view import MirrorView
from tests.jaxtrain.recipes.ring import PROMPTS, RL_STEPS, WARM_STEPS, Ring

pytestmark = pytest.mark.timeout(3600)  # three starts, on whatever machine


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    ring = Ring(tmp_path_factory.mktemp("runs"))

    def a_redo_meets_the_head() -> bool:
        """The first steps of RL are published, and no checkpoint is past the head."""
        if len(ring.rl_rows()) < 2:
            return False
        head = ring.head()
        return head is not None and head.version >= 3 and head.step >= ring.checkpoint()

    said = ring.kill(ring.start(), "trainer", when=a_redo_meets_the_head)
    assert "trainer: killed by SIGKILL" in said and "same command" in said
    said = ring.kill(ring.start(), "worker-0", when=lambda: len(ring.rl_rows()) >= 5)
    assert "worker-0: killed by SIGKILL" in said
    last = ring.start()
    output, _ = last.communicate(timeout=900)
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
    """A version a step after the first, each a child of the one before; three incarnations.

    On a machine that stalls, a publication that waited for its turn gives way to that of the next step.
    """
    latest, run = read_latest(store), load_run(store)
    assert latest is not None and run is not None
    assert run.incarnation == latest.incarnation == 3
    found, ref = [], latest.manifest
    while ref is not None:
        manifest = read_manifest(store, ref, run)
        found.append((manifest.version, manifest.step))
        ref = manifest.parent
    versions, steps = zip(*found[::-1], strict=True)
    assert versions == tuple(range(1, latest.version + 1))
    assert (steps[0], steps[-1]) == (WARM_STEPS, WARM_STEPS + RL_STEPS)
    assert list(steps) == sorted(set(steps))
    assert RL_STEPS + 1 - latest.version <= ring.overtaken()
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
    latest = read_latest(store)
    assert latest is not None
    assert summary["restarts"] == 2 and summary["versions_published"] == latest.version
    assert summary["evaluated_versions"] == [1, latest.version]
    assert 0 <= summary["reward_before"] <= 1 and 0 <= summary["reward_after"] <= 1
    for key in store.list("evaluations/"):
        if key.endswith("result.json"):
            result = store.read_json(key)
            assert result is not None and result["count"] == PROMPTS and result["failed"] == 0


def test_a_finished_run_is_not_started_again(ring):
    before = (ring.run_dir / "logs" / "trainer.log").stat().st_size
    process = ring.start()
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0 and "is finished" in output
    assert (ring.run_dir / "logs" / "trainer.log").stat().st_size == before
