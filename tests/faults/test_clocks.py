"""Workers whose wall clocks differ or step: nothing is lost, no worker ends, hardly a group is made twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rollout_bridge.control import FINISHED, RunState
from rollout_bridge.store import Store
from rollout_bridge.trajectories import accounting
from rollout_bridge.trajectories.claims import grant

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.faults.clock_program"
GROUPS, HOUR, DEADLINE = 120, 3600.0, 400.0
MEMBERS = 4

# The offset of each worker at the start, and of each from the middle of the run on.
CLOCKS = {
    "right": ((0, 0, 0), (0, 0, 0)),
    "skews": ((-HOUR, 0, HOUR), (-HOUR, 0, HOUR)),
    "skew-above-a-lease": ((0, 7, -7), (0, 7, -7)),
    "steps-ahead": ((0, 0, 0), (0, 61, HOUR)),
    "steps-back": ((0, 0, 0), (0, -61, -HOUR)),
}


@pytest.mark.faults
@pytest.mark.parametrize("clocks", CLOCKS)
def test_clocks_waste_nothing_and_end_no_worker(clocks: str, tmp_path: Path, record_property) -> None:
    """At most 5 % of the groups are begun twice; the expected number is 0, as leases are never over."""
    store = Store.open(str(tmp_path / "store"))
    grant(store, GROUPS)
    before, after = CLOCKS[clocks]
    offsets = [tmp_path / f"offset-{number}" for number in range(len(before))]
    for path, seconds in zip(offsets, before, strict=True):
        path.write_text(str(seconds))
    logs = [(tmp_path / f"log-{number}").open("w+") for number in range(len(before))]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(tmp_path / "store"), f"w{number}", str(path)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for number, (path, log) in enumerate(zip(offsets, logs, strict=True))
    ]
    try:
        until = time.monotonic() + DEADLINE
        stepped = False
        while (done := accounting.count(store).groups) < GROUPS:
            assert time.monotonic() < until, f"{done} of {GROUPS} groups"
            for number, worker in enumerate(workers):
                assert worker.poll() is None, (tmp_path / f"log-{number}").read_text()
            if done >= GROUPS // 3 and not stepped:
                stepped = True
                for path, seconds in zip(offsets, after, strict=True):
                    path.with_suffix(".new").write_text(str(seconds))
                    path.with_suffix(".new").replace(path)
            time.sleep(0.2)
        state = RunState(phase=FINISHED, step=1, rl_step=1, version=1, time=0)
        store.put_json(state.key, state.to_json())
        assert [worker.wait(DEADLINE) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    counts = accounting.count(store)
    assert counts.adds_up and counts.groups == GROUPS and counts.missing == 0
    begun = Counter(
        line.split()[1]
        for number in range(3)
        for line in (tmp_path / f"log-{number}").read_text().splitlines()
        if line.startswith("begun ")
    )
    wasted = sum(begun.values()) - GROUPS * MEMBERS
    record_property("outcome", f"{wasted} of {GROUPS * MEMBERS} answers made twice")
    assert wasted <= 0.05 * GROUPS * MEMBERS
