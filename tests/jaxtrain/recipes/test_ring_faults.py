"""Each process of the ring killed at each phase, then the same command: the run ends as if nothing was."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout_bridge.control import CONTRACT_KEY, Refusals, read
from rollout_bridge.store import Store
from rollout_bridge.trajectories import segment
from rollout_bridge.trajectories.accounting import count
from rollout_bridge.trajectories.contract import Contract
from rollout_bridge.trajectories.log import SegmentWriter
from rollout_bridge.trajectories.plan import plan_steps, read_plan
from rollout_bridge.trajectories.schema import Trajectory
from rollout_bridge.weights.format.chain import read_latest
from tests.jaxtrain.recipes.ring import RL_STEPS, WARM_STEPS, Ring
from tests.rollout_bridge.trajectories.conftest import made_group
from tests.running import runs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]  # two runs each, on whatever machine


def assert_sound(ring: Ring, rl_steps: int = RL_STEPS) -> None:
    """The last version has the weights of the last step; a step before it may have no version."""
    store = Store.open(str(ring.run_dir / "store"))
    counts, latest = count(store), read_latest(store)
    assert counts.adds_up and counts.twice == 0 and counts.missing == 0
    assert plan_steps(store) == list(range(rl_steps))
    assert latest is not None and latest.step == WARM_STEPS + rl_steps and latest.version <= rl_steps + 1
    assert "differs from version" not in (ring.run_dir / "logs" / "trainer.log").read_text()


def finish(ring: Ring) -> None:
    last = ring.start()
    output, _ = last.communicate(timeout=900)
    assert last.returncode == 0, output


@pytest.mark.parametrize("victim", ["trainer", "worker-0"])
@pytest.mark.parametrize("rl_steps", [None, 0, 1, 4, 9])
def test_a_killed_process_leaves_no_trace(tmp_path, victim, rl_steps):
    """Killed before the first RL step (None: during the warm start) or after so many."""
    ring = Ring(tmp_path)

    def due() -> bool:
        if rl_steps is None:
            return (ring.run_dir / "metrics.jsonl").exists()
        published = (ring.run_dir / "store" / "weights" / "latest").exists()
        return published and len(ring.rl_rows()) >= rl_steps

    ring.kill(ring.start(), victim, when=due)
    finish(ring)
    assert_sound(ring)


def hostile(contract: Contract) -> dict[str, list[Trajectory]]:
    """A group of each kind, each with a prompt of its own, by what its reason says."""
    size = contract.group_size

    def group(number: int, **changes: Any) -> list[Trajectory]:
        rows = made_group(10**6 + number, rewards=[0.0, 1.0] * (size // 2), versions=[[1, 1, 1]] * size)
        rows = [replace(row, token_ids=row.token_ids % 7, temperature=contract.temperature) for row in rows]
        return [replace(rows[0], **changes), *rows[1:]]

    tokens = group(0)[0].token_ids
    return {
        "temperature": group(1, temperature=0.0),
        "reward": group(2, reward=1e39),
        "token id": group(3, token_ids=np.where(tokens >= 0, contract.vocabulary, tokens).astype(np.int32)),
        "not finite": group(4, behavior_logprobs=np.full(len(tokens), np.nan, np.float32)),
        "group_size": group(5)[:1],
        "routed experts": group(6, routed_experts=np.zeros((len(tokens), 2, 2), np.int16)),
    }


def test_hostile_rows_are_quarantined_and_no_step_is_nan(tmp_path, monkeypatch):
    """Written beside those of the run's worker by one that checks nothing."""
    ring = Ring(tmp_path)
    running, key = ring.start(), ring.run_dir / "store" / CONTRACT_KEY
    ring.wait(running, key.exists)
    store = Store.open(str(ring.run_dir / "store"))
    contract = read(store, Contract, CONTRACT_KEY)
    assert contract is not None
    kinds = hostile(contract)
    monkeypatch.setattr(segment, "_check", lambda *row: None)
    keys = {
        SegmentWriter(store, "hostile", contract=contract).append(rows): reason
        for reason, rows in kinds.items()
    }
    far = [replace(row, versions=np.where(row.trainable, 10**6, -1)) for row in hostile(contract)["reward"]]
    SegmentWriter(store, "ahead", contract=contract).append([replace(row, reward=0.5) for row in far])
    monkeypatch.undo()
    output, _ = running.communicate(timeout=900)
    assert running.returncode == 0, output
    assert_sound(ring)
    quarantined = {}
    for step in range(RL_STEPS):
        plan = read_plan(store, step)
        assert plan is not None and not any(row.segment in keys for row in plan.rows)
        quarantined |= plan.quarantined
    assert quarantined.keys() == keys.keys() and all(keys[key] in quarantined[key] for key in keys)
    told = read(store, Refusals, "control/refused/hostile.json")
    assert told is not None and told.segments == len(keys)
    rows = ring.rl_rows()
    assert all(row["loss"] is not None and row["update_rms"] for row in rows), "NaN is written as null"
    assert rows[-1]["quarantined_segments"] == len(keys)
    assert sum(row.get("dropped_ahead_of_trainer", 0) for row in rows) == len(far)


def test_a_killed_parent_takes_its_processes_along(tmp_path):
    """kill -9 of the quickstart itself: no process of it survives to write beside the next one."""
    ring = Ring(tmp_path)
    parent = ring.start()
    ring.wait(parent, lambda: len(ring.rl_rows()) >= 2)
    children = json.loads((ring.run_dir / "processes.json").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    finish(ring)
    assert not any(map(runs, children.values()))
    assert_sound(ring)


def test_more_steps_may_be_asked_of_a_finished_run(tmp_path):
    ring = Ring(tmp_path)
    finish(ring)
    more = ring.start(f"rl.steps={RL_STEPS + 3}")
    output, _ = more.communicate(timeout=900)
    assert more.returncode == 0, output
    assert_sound(ring, RL_STEPS + 3)
