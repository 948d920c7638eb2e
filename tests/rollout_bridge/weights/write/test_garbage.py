"""What is collected is what no reader can need: agents, new readers and evaluations get where they must."""

import pytest

from rollout_bridge.store import Store
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.chain import read_latest, read_manifest
from rollout_bridge.weights.format.manifest import (
    QUARANTINE_PREFIX,
    VERSIONS_PREFIX,
    Manifest,
    parse_version_key,
)
from rollout_bridge.weights.write.garbage import Retention, collect
from tests.rollout_bridge.weights import tiny

TREES = [tiny.params()]
for _number in range(1, 9):
    TREES.append(tiny.step(TREES[-1], _number))


def keep(versions: int) -> Retention:
    return Retention(versions=versions, seconds=0.0)


@pytest.fixture
def store(tmp_path):
    """Eight versions; 1, 4 and 7 are full. Beside them what an unfinished version left."""
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store, full_every=3)
    trainer.take_over()
    for number in range(1, 9):
        trainer.publish(tiny.on_device(TREES[number]), step=number).result(300)
    trainer.close()
    store.put(f"{VERSIONS_PREFIX}00000008/000000/00000-00000.blob", b"left over")
    return store


def versions(store):
    places = {parse_version_key(key) for key in store.list(VERSIONS_PREFIX)}
    return sorted(place[0] for place in places if place is not None)


def test_without_readers_the_newest_full_version_and_what_follows_stay(store, tmp_path):
    store.put_json(f"{QUARANTINE_PREFIX}00000003-000001.json", {})
    store.put_json(f"{QUARANTINE_PREFIX}00000008-000001.json", {})
    collected = collect(store, retention=keep(100))
    assert collected.oldest_kept == 7 and versions(store) == [7, 8]
    assert collected.removed == (*((version, 1) for version in range(1, 7)), (8, 0))
    assert store.list(QUARANTINE_PREFIX) == [f"{QUARANTINE_PREFIX}00000008-000001.json"]
    reader = tiny.subscriber(store, tmp_path / "new")
    assert reader.advance() is not None
    tiny.assert_holds(reader, TREES[8])
    assert collect(store, retention=keep(100)).removed == ()


def test_what_the_publisher_did_not_write_beside_its_quarantines_stays(store):
    """And hides none of them, whether it is listed before or after them."""
    strangers = [f"{QUARANTINE_PREFIX}{name}" for name in ("-1.json", "README", "readme.json")]
    for key in strangers:
        store.put(key, b"see the wiki")
    store.put_json(f"{QUARANTINE_PREFIX}00000003-000001.json", {})
    assert collect(store, retention=keep(100)).oldest_kept == 7 and versions(store) == [7, 8]
    assert sorted(store.list(QUARANTINE_PREFIX)) == sorted(strangers)


def test_an_acknowledged_version_keeps_the_chain_after_it(store, tmp_path):
    reader = tiny.subscriber(store, tmp_path / "slow")
    reader.advance(5)
    tiny.acknowledge(store, "slow", 5)
    tiny.acknowledge(store, "new", None)
    assert collect(store, retention=keep(3)).oldest_kept == 6
    assert versions(store) == [6, 7, 8]
    update = reader.advance(6)
    assert update is not None and len(update.changed) < len(reader.mirror.view.specs)
    tiny.assert_holds(reader, TREES[6])


def test_an_agent_past_retention_takes_the_newest_full_version(store, tmp_path):
    reader = tiny.subscriber(store, tmp_path / "asleep")
    reader.advance(2)
    tiny.acknowledge(store, "asleep", 2)
    assert collect(store, retention=keep(3)).oldest_kept == 7
    update = reader.advance()
    assert update is not None and update.version == 8
    tiny.assert_holds(reader, TREES[8])


def test_an_evaluation_still_wanted_keeps_what_leads_to_its_version(store, tmp_path):
    request = {"id": "e", "version": 5, "prompts": [0, 1], "expires_after": 1.0}
    store.put_json("control/evaluations/e.json", request)
    assert collect(store, retention=keep(0)).oldest_kept == 4
    reader = tiny.subscriber(store, tmp_path / "new")
    update = reader.advance(5)
    assert update is not None and update.version == 5
    tiny.assert_holds(reader, TREES[5])
    store.put_json("evaluations/e/result.json", {})
    assert collect(store, retention=keep(0)).oldest_kept == 7


def test_nothing_published_is_nothing_to_collect(tmp_path):
    assert collect(tiny.open_store(tmp_path.name), retention=keep(1)).removed == ()
    with pytest.raises(ValueError, match="retention: versions: -1"):
        keep(-1)


def test_a_version_stays_for_its_time_after_the_next_one(store, tmp_path):
    run = runs.load(store)
    assert run is not None
    times = {}
    ref = read_latest(store).manifest
    while ref is not None:
        manifest = read_manifest(store, ref, run)
        times[manifest.version], ref = manifest.time, manifest.parent
    # Version 4 was the head until version 5 came; a reader that took it may still be reading it.
    just_after = Retention(versions=0, seconds=10.0)
    assert collect(store, retention=just_after, now=times[5] + 9.999).oldest_kept <= 4
    assert collect(store, retention=just_after, now=times[8] + 10.001).oldest_kept == 7


def test_a_collection_that_died_is_finished_by_the_next(store, tmp_path):
    """Killed after the manifest of 3: an acknowledgement of 1 leads into the gap, and nothing is stuck."""
    (manifest,) = [k for k in store.list(f"{VERSIONS_PREFIX}00000003/") if k.endswith("manifest.json")]
    store.delete(manifest)
    tiny.acknowledge(store, "old", 1)
    assert collect(store, retention=keep(100)).oldest_kept == 4
    assert versions(store) == [4, 5, 6, 7, 8]
    reader = tiny.subscriber(store, tmp_path / "new")
    assert reader.advance() is not None
    tiny.assert_holds(reader, TREES[8])


def test_whenever_a_collection_dies_a_manifest_still_there_has_every_blob_it_names(store):
    """Else a reader that finds the manifest would take the version for a broken one."""

    class Watched(Store):
        removed = 0

        def delete(self, key):
            super().delete(key)
            self.removed += 1
            left = set(self.list(VERSIONS_PREFIX))
            for name in left:
                if name.endswith("/manifest.json"):
                    manifest = Manifest.model_validate_json(self.read(name))
                    pieces = [p for entry in manifest.tensors.values() for p in (*entry.blobs, *entry.change)]
                    missing = {manifest.ref.directory + piece.key for piece in pieces} - left
                    assert not missing, f"{name} names what was removed before it: {sorted(missing)}"

    watched = Watched.open(store.url, probe=False)
    assert collect(watched, retention=keep(100)).oldest_kept == 7
    assert watched.removed > 2 * 6  # of each of six versions a manifest and a blob at least


def test_the_publishers_thread_removes_old_versions_and_counts_them(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store, full_every=2, retention=Retention(versions=0, seconds=0.0, every=4))
    trainer.take_over()
    for number in range(1, 6):  # the removal after version 4 is over when version 5 is
        trainer.publish(tiny.on_device(TREES[number]), step=number).result(300)
    assert versions(store) == [3, 4, 5]
    assert (trainer.counters["removed"], trainer.counters["removal_failures"]) == (2, 0)
    trainer.close()
