"""One write of a publication fails once: the same trainer goes on, and each version is what was published."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from rollout_bridge.store import StoreError
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format.manifest import QUARANTINE_PREFIX, Kind
from rollout_bridge.weights.read.subscriber import Subscriber
from rollout_bridge.weights.write.publisher import Publisher
from tests.rollout_bridge.failing import FailsOnce
from tests.rollout_bridge.weights import chains, tiny

# A full version, a delta, and a full version that also says what changed: the version that fails, every how
# many a full one comes, and the bytes of an object, so that each is several.
VERSIONS = {"full": (1, 100, 100_000), "delta": (3, 100, 1), "full-and-change": (3, 2, 100_000)}


def before(what: str, name: str) -> tuple[FailsOnce, Publisher]:
    """A trainer that has published all versions before that."""
    version, full_every, object_bytes = VERSIONS[what]
    tiny.open_store(name)
    store = FailsOnce.open(f"memory://{name}", probe=False)
    return store, chains.chain_of(store, version - 1, full_every=full_every, object_bytes=object_bytes)


@functools.cache
def writes_of(what: str) -> tuple[str, ...]:
    """What each write of the publication is of, counted where none fails."""
    store, trainer = before(what, f"counted-{what}")
    store.arm(None)
    chains.publish(trainer, VERSIONS[what][0])
    trainer.close()
    return tuple(store.keys)


def advance(reader: Subscriber, trees: dict[int, int]) -> None:
    """To the head; what the mirror then holds is the tree that was published as that version."""
    reader.advance()
    if reader.mirror.version is not None:
        tiny.assert_holds(reader, chains.TREES[trees[reader.mirror.version]])


def test_a_write_of_a_failed_attempt_that_arrives_late_changes_nothing(tmp_path: Path) -> None:
    """The store gave up a blob after its timeout, and takes it when the next attempt is committed."""
    store, trainer = before("delta", tmp_path.name)
    store.arm(0)
    with pytest.raises(StoreError, match="injected"):
        chains.publish(trainer, 3)
    late = store.keys[0]
    store.arm(None)
    manifest = chains.publish(trainer, 4)
    committed = {piece.key for entry in manifest.tensors.values() for piece in entry.blobs}
    assert manifest.version == 3 and late.rpartition("/")[2] not in committed
    store.put(late, b"of other weights")
    reader = tiny.subscriber(store, tmp_path / "mirror")
    advance(reader, {3: 4})
    assert reader.mirror.version == 3 and not reader.broken
    trainer.close()


@pytest.mark.parametrize("arrives", [False, True], ids=["not-written", "written"])
@pytest.mark.parametrize("what", VERSIONS)
def test_a_publication_goes_on_after_any_one_write_that_failed(
    what: str, arrives: bool, tmp_path: Path
) -> None:
    version = VERSIONS[what][0]
    writes = writes_of(what)
    assert len(writes) > 3 and [key.rpartition("/")[2] for key in writes[-2:]] == ["manifest.json", "latest"]
    assert all(key.endswith(".blob") for key in writes[:-2])
    for number, key in enumerate(writes):
        name = f"{tmp_path.name}-{number}"
        store, trainer = before(what, name)
        reader, lagging = (tiny.subscriber(store, tmp_path / f"{kind}-{number}") for kind in ("each", "last"))
        trees = {done: done for done in range(1, version + 4)}  # version -> the tree published as it
        advance(reader, trees)
        store.arm(number, arrives=arrives)
        # A manifest that is there is the version, whatever answer was lost: blobs are written again instead.
        stands = key.endswith("latest") or (key.endswith("manifest.json") and arrives)
        if key.endswith("manifest.json") and arrives:
            assert chains.publish(trainer, version).version == version
        else:
            with pytest.raises(StoreError, match="injected"):
                chains.publish(trainer, version)
        assert store.keys[number] == key
        advance(reader, trees)
        if not stands:
            trees = {done: done + (done >= version) for done in trees}
        for tree in range(version + 1, version + 4):
            manifest = chains.publish(trainer, tree)
            assert trees[manifest.version] == manifest.step == tree
            advance(reader, trees)
            assert reader.mirror.version == manifest.version
        latest = chain.read_latest(store)
        assert latest is not None and latest.incarnation == 1
        assert latest.version == reader.mirror.version == version + 3 - (not stands)
        assert not reader.broken and not store.list(QUARANTINE_PREFIX)
        if what == "delta":
            assert manifest.kind is Kind.DELTA
        trainer.close()
