"""What is collected is what no reader can need: agents, new readers and evaluations get where they must."""

import pytest

from rollout_bridge.weights.garbage import collect
from rollout_bridge.weights.manifest import ACKS_PREFIX, QUARANTINE_PREFIX, VERSIONS_PREFIX, parse_version_key
from tests.rollout_bridge.weights import tiny

TREES = [tiny.params()]
for _number in range(1, 9):
    TREES.append(tiny.step(TREES[-1], _number))


@pytest.fixture
def store(tmp_path):
    """Eight versions; 1, 4 and 7 are full. Beside them what an unfinished version left."""
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store, full_every=3)
    trainer.take_over()
    for number in range(1, 9):
        trainer.publish(tiny.on_device(TREES[number]), step=number).result(60)
    trainer.close()
    store.put(f"{VERSIONS_PREFIX}00000008/000000/00000-00000.blob", b"left over")
    return store


def versions(store):
    places = {parse_version_key(key) for key in store.list(VERSIONS_PREFIX)}
    return sorted(place[0] for place in places if place is not None)


def test_without_readers_the_newest_full_version_and_what_follows_stay(store, tmp_path):
    store.put_json(f"{QUARANTINE_PREFIX}00000003-000001.json", {})
    store.put_json(f"{QUARANTINE_PREFIX}00000008-000001.json", {})
    collected = collect(store, retention=100)
    assert collected.oldest_kept == 7 and versions(store) == [7, 8]
    assert collected.removed == (*((version, 1) for version in range(1, 7)), (8, 0))
    assert store.list(QUARANTINE_PREFIX) == [f"{QUARANTINE_PREFIX}00000008-000001.json"]
    reader = tiny.subscriber(store, tmp_path / "new")
    assert reader.advance() is not None
    tiny.assert_holds(reader, TREES[8])
    assert collect(store, retention=100).removed == ()


def test_an_acknowledged_version_keeps_the_chain_after_it(store, tmp_path):
    reader = tiny.subscriber(store, tmp_path / "slow")
    reader.advance(5)
    store.put_json(f"{ACKS_PREFIX}slow.json", {"version": 5})
    store.put_json(f"{ACKS_PREFIX}new.json", {"version": None})
    assert collect(store, retention=3).oldest_kept == 6
    assert versions(store) == [6, 7, 8]
    update = reader.advance(6)
    assert update is not None and len(update.changed) < len(reader.mirror.view.specs)
    tiny.assert_holds(reader, TREES[6])


def test_an_agent_past_retention_takes_the_newest_full_version(store, tmp_path):
    reader = tiny.subscriber(store, tmp_path / "asleep")
    reader.advance(2)
    store.put_json(f"{ACKS_PREFIX}asleep.json", {"version": 2})
    assert collect(store, retention=3).oldest_kept == 7
    update = reader.advance()
    assert update is not None and update.version == 8
    tiny.assert_holds(reader, TREES[8])


def test_an_evaluation_still_wanted_keeps_what_leads_to_its_version(store, tmp_path):
    store.put_json("control/evaluations/e.json", {"id": "e", "version": 5, "expires": 1000.0})
    assert collect(store, retention=0, now=999.0).oldest_kept == 4
    reader = tiny.subscriber(store, tmp_path / "new")
    update = reader.advance(5)
    assert update is not None and update.version == 5
    tiny.assert_holds(reader, TREES[5])
    assert collect(store, retention=0, now=1001.0).oldest_kept == 7


def test_nothing_published_is_nothing_to_collect(tmp_path):
    assert collect(tiny.open_store(tmp_path.name), retention=1).removed == ()
    with pytest.raises(ValueError, match="retention: -1"):
        collect(tiny.open_store(tmp_path.name), retention=-1)
