"""The first batch after a resume comes from the restored weights, also of a host that still held older ones.

Trainer, store, log, worker and engine are the real ones, in one process. The oracle of a version's
log-probabilities is the decoder over whole sequences, on the checkpoint of that version's step, quantised on
the host: no chain, no cache, no engine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.commands.environment import environment_of
from jaxtrain.commands.fleet import run_worker
from jaxtrain.config.load import load_config
from jaxtrain.config.resume import claim_run
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.recipes import async_grpo
from jaxtrain.training.checkpoint import Checkpointer
from jaxtrain.training.checkpoint_reader import CheckpointReader
from rollout_bridge.control import STATE_KEY
from rollout_bridge.store import Store
from rollout_bridge.trajectories.claims import grant, granted
from rollout_bridge.trajectories.log import read_segment
from rollout_bridge.trajectories.plan import read_plan
from rollout_bridge.weights.format.chain import read_latest, read_manifest
from rollout_bridge.weights.format.run import load as load_run
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.subscriber import Subscriber
from tests.jaxtrain.recipes.test_supervised import ROOT, SMALL_MODEL
from tests.served_oracle import ServedOracle, Weights

pytestmark = [pytest.mark.usefixtures("one_device"), pytest.mark.timeout(1800)]  # on whatever machine
STEPS = 2  # of RL before the resume; one after it
LENGTH = 48
TOLERANCE = 1e-4
OVERRIDES = [
    SMALL_MODEL,
    "warm_start.steps=2",
    "warm_start.batch={start_tokens: 768, end_tokens: 768}",
    "rl.learning_rate={kind: constant, peak: 1e-2}",  # so that versions can be told apart
    "rl.batch={start_tokens: 384, end_tokens: 384}",
    f"batch={{rows: 8, sequence_length: {LENGTH}}}",
    "checkpoint={every_steps: 1, keep: 9}",
    # A batch of the trainer's own version, or none.
    "trajectories={max_lag: 0, filters: []}",
    "environment={held_out_prompts: 8}",
    "evaluation={prompts: 8}",
    "rollouts={max_tokens: 12, slots: 16, group_size: 4, outstanding_groups: 16, segment_groups: 2}",
    "rollouts.lease_seconds=5",
]


def config(directory: Path, steps: int) -> AsyncGrpoConfig:
    loaded = load_config(
        ROOT / "configs/quickstart.yaml",
        [*OVERRIDES, f"runs_dir={directory}", "name=ring", f"rl.steps={steps}"],
    )
    assert isinstance(loaded, AsyncGrpoConfig)
    return loaded


def run_ring(config: AsyncGrpoConfig, worker: str, *, first: str = "trainer") -> None:
    """The trainer until it is done, with one rollout worker.

    first: the other starts once this one is at work; "worker": once answers of it are in the log.
    """

    async def both() -> None:
        working = asyncio.create_task(run_worker(config, environment_of(config, source=ROOT), worker))
        while (
            first == "worker" and not working.done() and not answers_of(worker, Store.open(config.store_url))
        ):
            await asyncio.sleep(0.1)
        await asyncio.to_thread(async_grpo.run, config, claim_run(config))
        await working

    asyncio.run(both())


def answers_of(worker: str, store: Store) -> list[str]:
    """Keys of its segments."""
    return store.list(f"trajectories/{worker}-")


def versions(store: Store, run_dir: Path, oracle: ServedOracle) -> dict[int, Weights]:
    """Of each published version: what an engine must hold, from the checkpoint of its step."""
    run, latest = load_run(store), read_latest(store)
    assert run is not None and latest is not None
    checkpoints = Checkpointer(run_dir / "checkpoints", keep=9, save_interval_steps=1)
    found: dict[int, Weights] = {}
    ref = latest.manifest
    while ref is not None:
        manifest = read_manifest(store, ref, run)
        stored = checkpoints._manager.restore(manifest.step)["arrays"]
        kinds = {
            path: "buffers" if path in oracle.definition.buffers else "params"
            for path in oracle.definition.shapes
        }
        found[manifest.version] = oracle.served({path: stored[f"{kinds[path]}/{path}"] for path in kinds})
        ref = manifest.parent
    checkpoints.close()
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> AsyncGrpoConfig:
    """A run stopped after `STEPS`, then resumed with another host, whose mirror is at the first version."""
    directory = tmp_path_factory.mktemp("runs")
    run_ring(config(directory, STEPS), "before")
    longer = config(directory, STEPS + 1)
    store = Store.open(longer.store_url)
    mirror = Mirror(longer.run_dir / "workers" / "after" / "mirror")
    assert Subscriber(store, mirror).advance(1) is not None
    mirror.close()
    store.delete(STATE_KEY)  # "finished": hosts would leave before the trainer is back
    grant(store, granted(store) + 8)
    # The host has answered before the trainer goes on: what the host before left could fill the whole batch.
    run_ring(longer, "after", first="worker")
    return longer


def test_the_first_batch_after_a_resume_comes_from_the_restored_weights(resumed):
    store = Store.open(resumed.store_url)
    run = load_run(store)
    assert run is not None
    oracle = ServedOracle(run, length=LENGTH)
    weights = versions(store, resumed.run_dir, oracle)
    restored = STEPS + 1
    assert sorted(weights) == list(range(1, restored + 2))
    made = {
        trajectory.trajectory_id: trajectory
        for key in store.list("trajectories/")
        for trajectory in read_segment(store, key)
    }
    plan = read_plan(store, STEPS)
    assert plan is not None and plan.version == restored
    batch = [made[row.trajectory_id] for row in plan.rows]
    by_the_host = [trajectory for trajectory in made.values() if trajectory.worker.startswith("after")]
    assert batch and by_the_host
    assert min(trajectory.versions[trajectory.trainable].min() for trajectory in by_the_host) == restored
    assert all((trajectory.versions[trajectory.trainable] >= restored).all() for trajectory in batch)
    older = 0.0
    for trajectory in batch + by_the_host:
        version = int(trajectory.versions[trajectory.trainable][0])
        # Tokens after an update may look at keys and values from before it.
        told = trajectory.trainable & (trajectory.versions == version)
        found = trajectory.behavior_logprobs[told]
        before, expected = (oracle.logprobs(weights[v], trajectory.token_ids) for v in (version - 1, version))
        np.testing.assert_allclose(found, expected[told], rtol=0, atol=TOLERANCE)
        older = max(older, np.abs(found - before[told]).max())
    assert older > 100 * TOLERANCE, "the oracle does not tell one version from the one before"


def test_a_finished_run_leaves_its_last_weights_in_a_checkpoint(resumed):
    """So that an export is of them, whatever the interval."""
    latest = read_latest(Store.open(resumed.store_url))
    assert latest is not None
    assert CheckpointReader(resumed.run_dir / "checkpoints").step == latest.step
