"""The trainer killed (SIGKILL) at every write of a publication and of a removal, and started again.

At every moment a reader holds a published version whole; after the restart the chain goes on from the head
without a gap, and nothing of the dead attempt is ever read.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_bridge.weights.format.chain import read_latest
from rollout_bridge.weights.format.manifest import VERSIONS_PREFIX, parse_version_key
from tests.faults.fleet import until
from tests.faults.trainer_program import FULL_EVERY, tree_of
from tests.rollout_bridge.weights import tiny

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("trainer_program.py")
# name: (which write kills, the head afterwards). 1, 4 and 7 are full; after 6 and 9 old ones are removed.
CASES = {
    "before the blobs": (r"write 00000002/.*\.blob 1 before", 1),
    "between two blobs": (r"write 00000002/.*\.blob 2 after", 1),
    "between blobs and manifest": (r"write 00000002/.*manifest 1 before", 1),
    "between manifest and latest": (r"write 00000002/.*manifest 1 after", 1),
    "after latest": (r"write latest 3 after", 2),  # 1: taking over
    "during the first full version": (r"write 00000001/.*\.blob 3 after", 0),
    "during a full version": (r"write 00000004/.*\d/(\d+-){3}\d+\.blob 3 after", 3),
    "between a full version and its change": (r"write 00000004/.*change.*\.blob 1 before", 3),
    "while it takes over": (r"write latest 1 after", 0),
    "during removal, first manifest": (r"delete manifest 1 after", 6),
    "during removal, between blobs": (r"delete \.blob 4 before", 6),
}
QUICK = "between manifest and latest"


def start(url: str, last: int, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), url, str(last)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(case: str, directory: Path, record, *, last: int) -> None:
    rule, expected = CASES[case]
    store = tiny.open_store(f"{directory}/store")
    killed = start(store.url, last, KILL_AT=rule)
    _, errors = killed.communicate(timeout=500)
    assert killed.returncode == -signal.SIGKILL, errors
    latest = read_latest(store)
    assert (latest.version if latest else 0) == expected
    reader = tiny.subscriber(store, directory / "mirror")
    if expected:
        update = reader.advance()
        assert update is not None and update.version == expected
        tiny.assert_holds(reader, tree_of(expected))

    again = start(store.url, last)
    output, errors = again.communicate(timeout=500)
    assert again.returncode == 0, errors
    seen = json.loads(output)
    assert seen["found"] == expected and seen["reproduced"] in ((True,) if expected else (None,))
    assert seen["published"] == list(range(expected + 1, last + 1))
    update = reader.advance()
    assert update is not None and update.version == last and not reader.broken
    tiny.assert_holds(reader, tree_of(last))
    kept = {place for key in store.list(VERSIONS_PREFIX) if (place := parse_version_key(key))}
    if last > 2 * FULL_EVERY:
        oldest = 1 + FULL_EVERY * (last // FULL_EVERY - 1)  # the newest full version at the last removal
        assert seen["counters"]["removed"] > 0
        assert sorted(version for version, _ in kept) == list(range(oldest, last + 1))
    record("outcome", f"head {expected}, then {seen['published'][0]} to {last}, {len(kept)} versions kept")


def test_a_trainer_killed_between_manifest_and_latest_leaves_no_trace(tmp_path, record_property):
    check(QUICK, tmp_path, record_property, last=3)


@pytest.mark.faults
@pytest.mark.parametrize("case", [case for case in CASES if case != QUICK])
def test_a_trainer_may_die_at_any_write(case, tmp_path, record_property):
    check(case, tmp_path, record_property, last=9 if "removal" in case else 7)


@pytest.mark.faults
def test_of_two_trainers_the_older_is_fenced_and_says_by_whom(tmp_path, record_property):
    """The older one is held just before it moves the head; the newer one takes over; the older goes on."""
    store, hold = tiny.open_store(f"{tmp_path}/store"), tmp_path / "hold"
    older = start(store.url, 2, HOLD=str(hold))
    until("move of the head", (tmp_path / "hold.reached").exists, deadline=500)
    newer = start(store.url, 3)
    output, errors = newer.communicate(timeout=500)
    assert newer.returncode == 0, errors
    hold.touch()
    _, errors = older.communicate(timeout=500)
    assert older.returncode == 1
    assert "incarnation 1 of this run is superseded by incarnation 2" in errors
    assert f"pid {newer.pid}" in errors
    assert json.loads(output)["published"] == [2, 3]
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, tree_of(3))
    record_property("outcome", "older: superseded by incarnation 2, named by host and pid; exit 1")
