"""A reader's complaint makes a full version only if what it names is broken; foreign objects make nothing.

The oracle is the damage: what the test broke is broken, everything else is good.
"""

import json

import pytest

from rollout_bridge.control import ACKS_PREFIX
from rollout_bridge.weights.format.chain import read_latest
from rollout_bridge.weights.format.manifest import QUARANTINE_PREFIX, VERSIONS_PREFIX, Kind
from rollout_bridge.weights.read.mirror_view import MirrorError
from rollout_bridge.weights.write.garbage import Retention, collect
from tests.rollout_bridge.weights import chains, tiny

FOREIGN = ["readme.json", "README", "-1.json", "00000003.json", "00000003-000001.txt", "x-y.json", "1-1.json"]


def record_key(version: int) -> str:
    return f"{QUARANTINE_PREFIX}{version:08d}-000001.json"


def record(what: str) -> dict:
    return {"agent": "reader", "what": what, "reason": "", "time": 0.0}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_object_among_the_records_stops_nothing(name, tmp_path):
    """Version 3 is a delta as it would be without it, and the object stays."""
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 2)
    store.put(f"{QUARANTINE_PREFIX}{name}", b"not a record")
    assert chains.publish(trainer, 3).kind is Kind.DELTA
    assert store.read(f"{QUARANTINE_PREFIX}{name}") == b"not a record"
    trainer.close()


@pytest.mark.parametrize(
    "what",
    [
        "blob",
        "tensor model.norm.weight",
        "manifest",
        "tensor of no model",
        "",
        "nothing newer can be reached",
    ],
)
def test_a_record_of_a_good_version_makes_no_full_one_and_is_removed(what, tmp_path):
    """A reader whose disk is bad finds every head broken; each next version would be full."""
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 1)
    for version in (2, 3, 4):
        head = read_latest(store)
        assert head is not None and head.manifest is not None
        named = {
            "blob": chains.keys_of(store, head.version, ".blob")[0],
            "manifest": head.manifest.key,
        }.get(what, what)
        store.put_json(record_key(head.version), record(named))
        assert chains.publish(trainer, version).kind is Kind.DELTA
        assert store.list(QUARANTINE_PREFIX) == []
    trainer.close()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"what": 3}', b"\xff"])
def test_a_record_that_says_nothing_is_removed(content, tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 2)
    store.put(record_key(2), content)
    assert chains.publish(trainer, 3).kind is Kind.DELTA
    assert store.list(QUARANTINE_PREFIX) == []
    trainer.close()


def test_a_record_of_a_tensor_that_its_blobs_do_not_lead_to_is_believed(tmp_path):
    """Every hash fits and the digest in the manifest is another: only replaying the tensor shows it."""
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 2)
    trainer.close()
    name = "model.layers.1.self_attn.q_proj.weight"
    chains.forge(store, trainer.run, 2, name, digest="0" * 16)
    follower = tiny.publisher(store)
    follower.take_over()  # rebuilds the head as a reader does, and complains itself
    assert json.loads(store.read(record_key(2)) or b"")["what"] == f"tensor {name}"
    assert chains.publish(follower, 3).kind is Kind.FULL
    follower.close()


def test_of_two_records_the_true_one_makes_a_full_version(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 4)
    for version in (2, 3):
        store.put_json(record_key(version), record(chains.keys_of(store, version, ".blob")[0]))
    chains.damage(store, 3, "flipped bit in a blob")
    assert chains.publish(trainer, 5).kind is Kind.FULL
    assert chains.publish(trainer, 6).kind is Kind.DELTA  # a full version has answered it
    trainer.close()


def test_a_reader_tries_again_what_the_trainer_finds_good(tmp_path):
    """Its network gave it wrong bytes for a while; no full version is needed for it to go on."""
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror", attempts=1)
    assert reader.advance(1) is not None
    (key,) = chains.keys_of(store, 2, ".blob")
    good = store.read(key)
    assert good is not None
    store.put(key, chains.flip(good))
    with pytest.raises(ValueError, match="version 2"):
        reader.advance()
    store.put(key, good)
    assert chains.publish(trainer, 3).kind is Kind.DELTA
    update = reader.advance()
    assert update is not None and update.version == 3
    tiny.assert_holds(reader, chains.TREES[3])
    trainer.close()


def test_a_mirror_that_rotted_is_not_blamed_on_the_next_version(tmp_path):
    """An element that version 2 changes rots on the reader's disk: version 2 is good, the mirror is not."""
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror", verify_bytes=0)
    assert reader.advance(1) is not None
    bits = reader.mirror.view.writable("model.norm.weight")
    bits ^= 1
    with pytest.raises(MirrorError, match="model.norm.weight"):
        reader.advance()
    assert store.list(QUARANTINE_PREFIX) == [] and not reader.broken
    assert reader.advance() is not None
    tiny.assert_holds(reader, chains.TREES[2])
    trainer.close()


def test_other_objects_among_acknowledgements_keep_nothing_and_stop_nothing(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 5, full_every=2).close()
    for name in ("readme.json", "README", "a/b.json"):
        store.put(f"{ACKS_PREFIX}{name}", b'{"version": 1}')
    assert collect(store, retention=Retention(versions=100, seconds=0.0)).oldest_kept == 5


def test_other_objects_beside_versions_stop_nothing(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 1)
    for name in ("readme.json", "00000001/readme", "x/y/z.blob"):
        store.put(f"{VERSIONS_PREFIX}{name}", b"not ours")
    chains.publish(trainer, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    assert reader.advance() is not None
    tiny.assert_holds(reader, chains.TREES[2])
    trainer.close()
