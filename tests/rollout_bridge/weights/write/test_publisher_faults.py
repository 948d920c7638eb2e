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


def failing_once(name: str) -> tiny.FailsOnce:
    tiny.open_store(name)
    return tiny.FailsOnce.open(f"memory://{name}", probe=False)


def test_a_publication_that_failed_before_its_manifest_may_be_tried_again(tmp_path):
    store = failing_once(tmp_path.name)
    trainer = chains.chain_of(store, 1)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    store.fail_at("manifest.json", after=False)
    with pytest.raises(StoreError, match=r"manifest\.json' failed: connection reset"):
        chains.publish(trainer, 2)
    assert chains.keys_of(store, 2, ".blob") and not chains.keys_of(store, 2, "manifest.json")
    assert trainer.head.version == 1 and reader.advance() is None
    for number in (3, 4, 5):  # its bits never were the head's, so what changed is counted from version 1
        manifest = chains.publish(trainer, number)
        assert (manifest.version, manifest.kind) == (number - 1, Kind.DELTA)
        assert reader.advance() is not None
        tiny.assert_holds(reader, chains.TREES[number])
    assert not reader.broken
    trainer.close()


# A manifest that was written though the answer was lost is left out: there only a restart goes on.
@pytest.mark.parametrize(
    ("ending", "after"), [(".blob", False), (".blob", True), ("latest", False), ("latest", True)]
)
def test_after_one_failed_write_the_same_trainer_goes_on_from_what_is_durable(ending, after, tmp_path):
    """A version whose manifest is written counts: the move of the head to it is done first."""
    store = failing_once(tmp_path.name)
    trainer = chains.chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    store.fail_at(ending, after=after)
    with pytest.raises(StoreError, match=f"{ending}' failed: connection reset"):
        chains.publish(trainer, 3)
    durable = {2: 2} | ({3: 3} if ending == "latest" else {})  # version -> the tree that it holds
    for number in (4, 5, 6):
        manifest = chains.publish(trainer, number)
        assert (manifest.version, manifest.kind) == (1 + max(durable), Kind.DELTA)
        durable[manifest.version] = number
    for version, number in sorted(durable.items())[1:]:
        update = reader.advance(version)
        assert update is not None and update.version == version
        tiny.assert_holds(reader, chains.TREES[number])
    assert not reader.broken
    trainer.close()


def test_a_publication_that_waits_fails_with_the_one_in_flight(tmp_path):
    """Else whoever asks for its result waits for ever."""

    class Held(Store):
        """The first manifest is refused, as soon as it is `let`."""

        refuses = True
        let = threading.Event()

        def create(self, key, data):
            if self.refuses and key.endswith("manifest.json"):
                assert self.let.wait(300)
                self.refuses = False
                raise StoreError("unreachable")
            return super().create(key, data)

    tiny.open_store(tmp_path.name)
    store = Held.open(f"memory://{tmp_path.name}")
    trainer = tiny.publisher(store)
    trainer.take_over()
    flight, waiting = (trainer.publish(tiny.on_device(chains.TREES[n]), step=n) for n in (1, 2))
    store.let.set()
    with pytest.raises(StoreError, match="unreachable"):
        flight.result(300)
    # One thread publishes: when it has done the next one, it has done all that it does for the first.
    assert chains.publish(trainer, 3).version == 1
    assert waiting.done()
    with pytest.raises(StoreError, match="unreachable"):
        waiting.result()
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, chains.TREES[3])
    trainer.close()


def test_a_manifest_that_another_wrote_is_never_taken_for_this_trainers(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 1)
    (own,) = chains.keys_of(store, 1, "manifest.json")
    foreign = own.replace("/00000001/", "/00000002/")
    store.put(foreign, b"of another program")
    with pytest.raises(StoreError, match=r"exists with other content .* Restart the trainer"):
        chains.publish(trainer, 2)
    latest = chain.read_latest(store)
    assert latest is not None and latest.version == 1 and store.read(foreign) == b"of another program"
    restarted = tiny.publisher(store)
    restarted.take_over()
    manifest = chains.publish(restarted, 3)
    assert (manifest.version, manifest.incarnation, manifest.kind) == (2, 2, Kind.DELTA)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, chains.TREES[3])
    restarted.close()


def test_a_manifest_that_the_store_took_and_then_refused_again_is_this_trainers(tmp_path):
    """As by a client that asks again because the answer was lost."""

    class Echo(Store):
        def create(self, key, data):
            return super().create(key, data) and not key.endswith("manifest.json")

    tiny.open_store(tmp_path.name)
    store = Echo.open(f"memory://{tmp_path.name}")
    trainer = chains.chain_of(store, 2)
    assert trainer.head.version == 2
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, chains.TREES[2])
    trainer.close()


@pytest.mark.parametrize("pointer", ["stale", "missing"])
def test_whatever_the_pointer_says_no_incarnation_of_a_run_is_used_twice(pointer, tmp_path):
    """run.json remembers the last one; else a trainer would write over what an earlier one has written."""
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 1).close()
    stale = store.read(LATEST_KEY)
    second = chains.chain_of(store, 3)
    second.close()
    assert stale is not None and second.head.incarnation == 2
    if pointer == "missing":
        store.delete(LATEST_KEY)
    else:
        store.put(LATEST_KEY, stale)  # as of a backup
    before = {key: store.read(key) for key in store.list("weights/versions/")}
    third = tiny.publisher(store)
    assert third.take_over().incarnation == 3
    for number in (4, 5, 6):
        chains.publish(third, number)
    assert all(store.read(key) == data for key, data in before.items())
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, chains.TREES[6])
    third.close()


def test_a_restarted_trainer_cuts_the_chain_where_one_that_ran_on_does(tmp_path):
    """What the deltas since the last full version weigh is read from the chain."""
    stores = [tiny.open_store(f"{tmp_path.name}-{name}") for name in ("ran-on", "restarted")]
    trainers = [chains.chain_of(store, 2, max_chain_fraction=0.5) for store in stores]
    kinds: list[list[Kind]] = []
    for number in range(3, 7):
        trainers[1].close()
        trainers[1] = tiny.publisher(stores[1], max_chain_fraction=0.5)
        trainers[1].take_over()
        kinds.append([chains.publish(trainer, number).kind for trainer in trainers])
    assert [Kind.FULL, Kind.FULL] in kinds and all(one is other for one, other in kinds)
    for trainer in trainers:
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
