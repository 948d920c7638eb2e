"""Whichever trainer dies or comes second: the head is one whole version, and the chain goes on."""

import threading
import time

import pytest

from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.manifest import LATEST_KEY, Kind
from rollout_bridge.weights.write.publisher import Superseded
from tests.rollout_bridge.weights import chains, tiny


# Writes of one publication by one process: the blobs, the manifest, the pointer.
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_trainer_killed_at_any_write_leaves_the_old_head_or_the_new_one(write, after, tmp_path):
    store = chains.mortal(tmp_path.name)
    trainer = chains.chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    store.kill_at(write, after=after)
    with pytest.raises(tiny.Killed):
        chains.publish(trainer, 3)
    assert store.keys[-1].endswith((".blob", "manifest.json", "latest")[write - 1])
    moved = write == 3 and after
    update = reader.advance()
    assert (update is not None) == moved
    tiny.assert_holds(reader, chains.TREES[3 if moved else 2])

    store.kill_at(0)
    restarted = tiny.publisher(store)
    head = restarted.take_over()
    assert (head.version, head.incarnation, head.step) == ((3, 2, 3) if moved else (2, 2, 2))
    # Restart is redo: the step after the checkpoint is trained again, then the chain goes on from the head.
    assert restarted.verify_head(tiny.on_device(chains.TREES[head.version]))
    for number in range(head.version + 1, 5):
        assert chains.publish(restarted, number).kind is Kind.DELTA
    assert reader.advance() is not None
    tiny.assert_holds(reader, chains.TREES[4])
    assert not reader.broken
    restarted.close()


def test_a_publication_that_failed_before_its_manifest_may_be_tried_again(tmp_path):
    store = tiny.open_store(tmp_path.name)
    flaky = tiny.Unreachable.open(store.url, probe=False)
    trainer = chains.chain_of(flaky, 1)
    flaky.failing = True
    with pytest.raises(RuntimeError, match="unreachable"):
        chains.publish(trainer, 2)
    flaky.failing = False
    assert chains.publish(trainer, 3).version == 2
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, chains.TREES[3])
    trainer.close()


def test_a_failure_while_the_next_one_is_dispatched_is_not_lost(tmp_path, monkeypatch):
    class Held(Store):
        """Once it `fails`, every call does so as soon as it is let."""

        fails = False
        let = threading.Event()

        def _call(self, verb, key, start):
            if self.fails:
                assert self.let.wait(300)
                raise StoreError("unreachable")
            return super()._call(verb, key, start)

    tiny.open_store(tmp_path.name)
    store = Held.open(f"memory://{tmp_path.name}")
    trainer = chains.chain_of(store, 1)
    store.fails = True
    first = trainer.publish(tiny.on_device(chains.TREES[2]), step=2)
    derivation = type(trainer._derivation)
    dispatch = derivation.__call__

    def dispatched_meanwhile(self, params):
        store.let.set()
        while not first.done():
            time.sleep(0.01)
        return dispatch(self, params)

    monkeypatch.setattr(derivation, "__call__", dispatched_meanwhile)
    with pytest.raises(StoreError, match="unreachable"):
        trainer.publish(tiny.on_device(chains.TREES[3]), step=3)
    monkeypatch.undo()
    store.fails = False
    assert chains.publish(trainer, 4).version == 2
    trainer.close()


def test_the_older_of_two_trainers_is_fenced_and_names_its_successor(tmp_path):
    store = tiny.open_store(tmp_path.name)
    older = chains.chain_of(store, 2)
    newer = tiny.publisher(store)
    assert newer.take_over().incarnation == 2
    with pytest.raises(Superseded, match=r"incarnation 1 .* superseded by incarnation 2 .*pid \d+") as caught:
        chains.publish(older, 3)
    assert caught.value.successor == newer.head
    with pytest.raises(RuntimeError, match="restart the trainer"):
        chains.publish(older, 3)
    assert chains.publish(newer, 3).incarnation == 2
    run = runs.load(store)
    assert run is not None and run.incarnation == 2
    reader = tiny.subscriber(store, tmp_path / "mirror")
    assert reader.advance() is not None
    tiny.assert_holds(reader, chains.TREES[3])


def test_a_trainer_superseded_while_it_writes_does_not_move_the_head(tmp_path):
    class TakenOver(tiny.Mortal):
        """Another trainer starts just before the pointer moves."""

        armed = False

        def _write(self, key, data, generation):
            if self.armed and key == LATEST_KEY:
                self.armed = False
                tiny.publisher(Store.open(self.url)).take_over()
            return super()._write(key, data, generation)

    tiny.open_store(tmp_path.name)
    store = TakenOver.open(f"memory://{tmp_path.name}")
    trainer = chains.chain_of(store, 1)
    store.armed = True
    with pytest.raises(Superseded):
        chains.publish(trainer, 2)
    latest = chain.read_latest(store)
    assert latest is not None and (latest.version, latest.incarnation) == (1, 2)


def test_of_two_trainers_that_start_at_once_one_owns_the_run(tmp_path):
    class Raced(Store):
        rival = None

        def _write(self, key, data, generation):
            if key == LATEST_KEY and self.rival is None:
                self.rival = tiny.publisher(Store.open(self.url))
                self.rival.take_over()
            return super()._write(key, data, generation)

    tiny.open_store(tmp_path.name)
    store = Raced.open(f"memory://{tmp_path.name}")
    with pytest.raises(Superseded):
        tiny.publisher(store).take_over()
    latest = chain.read_latest(store)
    assert latest is not None and store.rival is not None and latest == store.rival.head


@pytest.mark.parametrize("what", ["flipped bit in a blob", "missing manifest"])
def test_a_trainer_whose_chain_is_broken_starts_a_new_one(what, tmp_path):
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 3).close()
    chains.damage(store, 2, what)
    restarted = tiny.publisher(store)
    assert restarted.take_over().version == 3
    with pytest.raises(RuntimeError, match="nothing to compare with at version 3"):
        restarted.verify_head(tiny.on_device(chains.TREES[3]))
    assert chains.publish(restarted, 4).kind is Kind.FULL
    reader = tiny.subscriber(store, tmp_path / "mirror")
    assert reader.advance() is not None
    tiny.assert_holds(reader, chains.TREES[4])
