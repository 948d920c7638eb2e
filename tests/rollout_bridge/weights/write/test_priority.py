"""Threads that publish give way, and only they: the oracle is the kernel's own account of each thread."""

import os
import sys
import threading

import pytest

from rollout_bridge.weights.write.priority import yielding_pool
from tests.rollout_bridge.weights import tiny

LINUX = sys.platform == "linux"  # elsewhere a niceness is a process's


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_pool_runs_at_its_niceness_and_nothing_else_does():
    mine = niceness()
    with yielding_pool(2, "test", niceness=19) as lowest, yielding_pool(1, "test", niceness=0) as unchanged:
        assert lowest.submit(niceness).result() == (19 if LINUX else mine)
        assert unchanged.submit(niceness).result() == mine  # never raised, which would need privileges
    assert niceness() == mine


def test_a_publication_computes_at_the_niceness_of_its_settings_and_writes_at_the_trainers(tmp_path):
    seen: dict[str, set[int]] = {"write": set()}

    class Watched(tiny.Mortal):
        def _write(self, key, data, generation):
            seen["write"].add(niceness())
            return super()._write(key, data, generation)

    tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(Watched.open(f"memory://{tmp_path.name}"), niceness=17)
    trainer.take_over()
    tree = tiny.params()
    for number in (1, 2):
        trainer.publish(tiny.on_device(tree), step=number).result(300)
        tree = tiny.step(tree, number)
    assert trainer._writer.run_in_encoder(niceness) == (max(17, niceness()) if LINUX else niceness())
    assert seen["write"] == {niceness()}
    trainer.close()


def test_processes_encode_what_threads_do(tmp_path):
    """Blob for blob, with the statistics."""
    written = []
    for apart_bytes in (0, 1 << 40):
        store = tiny.open_store(f"{tmp_path.name}-{apart_bytes}")
        trainer = tiny.publisher(store, apart_bytes=apart_bytes)
        trainer.take_over()
        tree = tiny.params()
        for number in (1, 2):
            stats = trainer.publish(tiny.on_device(tree), step=number).result(300).stats
            tree = tiny.step(tree, number)
        trainer.close()
        blobs = {key: store.read(key) for key in store.list("weights/versions/") if key.endswith(".blob")}
        written.append((blobs, stats))
    assert written[0] == written[1] and len(written[0][0]) >= 2


@pytest.mark.parametrize("value", [-1, 20])
def test_a_niceness_out_of_range_is_refused(value, tmp_path):
    store = tiny.open_store(tmp_path.name)
    with pytest.raises(ValueError, match=f"niceness: {value} is not in"):
        tiny.publisher(store, niceness=value)
