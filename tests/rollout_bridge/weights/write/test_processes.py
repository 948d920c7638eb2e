"""Two real processes (gloo) publish one model: each its own shards, process 0 commits, a reader verifies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_bridge.weights.format.chain import read_latest
from tests.ports import held_port
from tests.rollout_bridge.weights import tiny
from tests.rollout_bridge.weights.write.processes_program import tree_of

ROOT = Path(__file__).parents[4]
PROGRAM = Path(__file__).with_name("processes_program.py")


def together(url: str, first: int, last: int, *, refused: int = 0) -> list[dict]:
    """What each of two processes printed."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    with held_port() as port:
        command = [sys.executable, str(PROGRAM), f"127.0.0.1:{port}"]
        running = [
            subprocess.Popen(
                [*command, str(process), url, *map(str, (first, last, refused))],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in (0, 1)
        ]
        try:
            outputs = [process.communicate(timeout=560) for process in running]
        finally:
            for process in running:
                process.kill()
    for output, errors in outputs:
        assert '{"' in output, errors
    return [json.loads(output[output.index('{"') :].splitlines()[0]) for output, _ in outputs]


def publish_three(directory):
    """Store and reader after versions 1 to 3. The oracle is the host quantiser on the whole parameters."""
    store = tiny.open_store(f"{directory}/store")
    reader = tiny.subscriber(store, directory / "mirror")
    first = together(store.url, 1, 3)
    assert [seen["kinds"] for seen in first] == 2 * [["full", "delta", "full+change"]]
    assert all(seen["blobs"] > 0 and seen["error"] is None for seen in first)
    update = reader.advance()
    assert update is not None and update.version == 3
    tiny.assert_holds(reader, tree_of(3))
    return store, reader


def test_two_processes_publish_one_model(tmp_path):
    publish_three(tmp_path)


@pytest.mark.faults
def test_two_processes_restart_and_go_on_from_the_head(tmp_path):
    store, reader = publish_three(tmp_path)
    again = together(store.url, 4, 4)
    assert [seen["reproduced"] for seen in again] == [True, True]
    assert [seen["kinds"] for seen in again] == 2 * [["delta"]]
    update = reader.advance()
    assert update is not None and (update.version, update.incarnation) == (4, 2)
    tiny.assert_holds(reader, tree_of(4))


@pytest.mark.faults
def test_a_process_that_cannot_write_is_named_and_the_head_stays(tmp_path):
    store = tiny.open_store(f"{tmp_path}/store")
    committer, other = together(store.url, 1, 2, refused=2)
    assert committer["kinds"] == other["kinds"] == ["full"]
    assert "waited 20 s for the part of attempt 2-2 by process(es) [1]" in committer["error"]
    assert "no space left" in other["error"]
    latest = read_latest(store)
    assert latest is not None and latest.version == 1
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, tree_of(1))
