"""Each process of the ring killed at each phase, then the same command: the run ends as if nothing was."""

from __future__ import annotations

import json
import signal

import pytest

from rollout_bridge.store import Store
from rollout_bridge.trajectories.accounting import count
from rollout_bridge.trajectories.plan import plan_steps
from rollout_bridge.weights.format.chain import read_latest
from tests.jaxtrain.recipes.ring import RL_STEPS, WARM_STEPS, Ring
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
