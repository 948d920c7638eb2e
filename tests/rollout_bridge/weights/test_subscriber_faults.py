"""Whatever breaks or dies: a reader serves one published version whole, and comes to the head again."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights import chain, mirror
from rollout_bridge.weights.manifest import LATEST_KEY, QUARANTINE_PREFIX, BrokenVersion, Kind
from tests.rollout_bridge.weights import chains, tiny


@pytest.mark.parametrize("what", chains.DAMAGES)
def test_a_broken_delta_is_passed_by_the_next_full_version(what, tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 4)
    chains.damage(store, 3, what)
    reader = tiny.subscriber(store, tmp_path / "mirror", name="reader")
    with_manifest = "blob" in what  # without a manifest nothing says what version 2 is; the full one is known
    update = reader.advance()
    assert update is not None and update.version == (2 if with_manifest else 1)
    tiny.assert_holds(reader, chains.TREES[update.version])
    with pytest.raises(BrokenVersion, match="version 3"):
        reader.advance()
    assert store.list(QUARANTINE_PREFIX) == [f"{QUARANTINE_PREFIX}00000003-000001.json"]

    assert chains.publish(trainer, 5).kind is Kind.FULL
    assert chains.publish(trainer, 6).kind is Kind.DELTA
    update = reader.advance()
    assert update is not None and update.version == 6
    assert update.changed == reader.mirror.view.specs.keys()
    tiny.assert_holds(reader, chains.TREES[6])
    assert reader.fallbacks == 1
    trainer.close()


def test_a_broken_full_version_is_passed_on_the_chain_before_it(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 5, full_every=3)  # 1 and 4 are full
    chains.damage(store, 4, "flipped bit in a blob")
    reader = tiny.subscriber(store, tmp_path / "mirror")
    update = reader.advance()
    assert update is not None and update.version == 3
    tiny.assert_holds(reader, chains.TREES[3])


def test_a_blob_that_is_wrong_once_is_fetched_again(tmp_path):
    class Noisy(Store):
        noise = 2

        def read(self, key):
            data = super().read(key)
            if key.endswith(".blob") and self.noise and data is not None:
                self.noise -= 1
                return chains.flip(data)
            return data

    tiny.open_store(tmp_path.name)
    store = Noisy.open(f"memory://{tmp_path.name}")
    chains.chain_of(store, 1)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    assert reader.advance() is not None
    tiny.assert_holds(reader, chains.TREES[1])
    assert store.noise == 0 and not reader.broken and not store.list(QUARANTINE_PREFIX)


def test_a_broken_version_is_reported_as_soon_as_the_store_takes_it(tmp_path):
    """Else the trainer would never hear of it, and publish no full version to pass it by."""

    class Refusing(Store):
        fails = True

        def create(self, key, data):
            if self.fails and key.startswith(QUARANTINE_PREFIX):
                self.fails = False
                raise StoreError("no space left")
            return super().create(key, data)

    tiny.open_store(tmp_path.name)
    store = Refusing.open(f"memory://{tmp_path.name}")
    trainer = chains.chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance(1)
    chains.damage(store, 2, "missing blob")
    for told in (False, True):
        with pytest.raises(BrokenVersion, match="version 2"):
            reader.advance()
        assert bool(store.list(QUARANTINE_PREFIX)) == told
    assert store.list(QUARANTINE_PREFIX) == [f"{QUARANTINE_PREFIX}00000002-000001.json"]
    assert chains.publish(trainer, 3).kind is Kind.FULL
    assert reader.advance() is not None
    tiny.assert_holds(reader, chains.TREES[3])
    trainer.close()


def test_a_lying_digest_is_caught_before_the_mirror_moves(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance(1)
    latest = chain.read_latest(store)
    assert latest is not None and latest.manifest is not None
    manifest = chain.read_manifest(store, latest.manifest, reader.run)
    name = next(name for name, entry in manifest.tensors.items() if entry.blobs)
    entry = manifest.tensors[name].model_copy(update={"digest": "0" * 16})
    lying = manifest.model_copy(update={"tensors": manifest.tensors | {name: entry}})
    store.put(lying.ref.key, lying.to_bytes())
    store.put(LATEST_KEY, latest.model_copy(update={"manifest": lying.ref}).to_bytes())
    with pytest.raises(BrokenVersion, match="version 2"):
        reader.advance()
    assert name in next(iter(reader.broken.values()))
    tiny.assert_holds(reader, chains.TREES[1])


def test_a_manifest_of_another_run_is_refused(tmp_path):
    store, other = tiny.open_store(tmp_path.name), tiny.open_store(f"{tmp_path.name}-other")
    chains.chain_of(store, 1)
    chains.chain_of(other, 1)
    for key in other.list("weights/"):
        data = other.read(key)
        assert data is not None
        store.put(key, data)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    with pytest.raises(BrokenVersion, match="version 1"):
        reader.advance()
    assert "is of run" in next(iter(reader.broken.values()))
    assert reader.mirror.state is None


def test_a_mirror_of_another_run_is_emptied(tmp_path):
    store, other = tiny.open_store(tmp_path.name), tiny.open_store(f"{tmp_path.name}-other")
    chains.chain_of(store, 2)
    chains.chain_of(other, 1)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    reader.mirror.close()
    moved = tiny.subscriber(other, tmp_path / "mirror")
    update = moved.advance()
    assert update is not None and update.version == 1
    tiny.assert_holds(moved, chains.TREES[1])


def test_a_stale_pointer_moves_nobody_back(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 2)
    stale = store.read(LATEST_KEY)
    assert stale is not None
    chains.publish(trainer, 3)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    store.put(LATEST_KEY, stale)
    assert reader.advance() is None
    assert reader.mirror.version == 3


def test_a_pinned_version_is_reached_even_before_the_newest_full_one(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 6, full_every=3)  # 1 and 4 are full
    reader = tiny.subscriber(store, tmp_path / "mirror")
    for version in (3, 5):
        update = reader.advance(version)
        assert update is not None and update.version == version
        tiny.assert_holds(reader, chains.TREES[version])
    assert reader.advance(5) is None
    update = reader.advance(9)
    assert update is not None and update.version == 6


def died(reader):
    """The process is gone: only its files are left."""
    reader.mirror._lock.close()


@pytest.mark.parametrize("moment", ["write_whole", "sync_directory", "replace", "unlink", "flush"])
@pytest.mark.parametrize("full", [True, False])
def test_a_reader_killed_at_any_moment_of_an_update_is_one_version_again(moment, full, tmp_path, monkeypatch):
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 3, full_every=2 if full else 100)  # 3 is full, or a delta
    owner, name = {
        "write_whole": (mirror.files, "write_whole"),
        "sync_directory": (mirror.files, "sync_directory"),
        "replace": (mirror.os, "replace"),
        "unlink": (mirror.Path, "unlink"),
        "flush": (np.memmap, "flush"),
    }[moment]
    original = getattr(owner, name)
    for count in itertools.count():  # dies at the first, second, ... call, until the update gets through
        directory = tmp_path / f"{count}"
        reader = tiny.subscriber(store, directory)
        reader.advance(2)
        died(reader)
        reader = tiny.subscriber(store, directory)
        lives = itertools.count(count, -1)

        def dying(*args, _lives=lives, **kwargs):
            if next(_lives) == 0:
                raise tiny.Killed
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dying)
            try:
                reader.advance()
                break
            except tiny.Killed:
                died(reader)
        reopened = tiny.subscriber(store, directory)
        assert reopened.mirror.version in (2, 3)
        _ = reopened.run
        tiny.assert_holds(reopened, chains.TREES[reopened.mirror.version])
        assert reopened.mirror.verify()
        reopened.advance()
        tiny.assert_holds(reopened, chains.TREES[3])
        reopened.mirror.close()
    assert count > 0


def test_a_damaged_journal_is_not_believed(tmp_path, monkeypatch):
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance(1)
    monkeypatch.setattr(mirror.Mirror, "_redo_journal", lambda self: (_ for _ in ()).throw(tiny.Killed()))
    with pytest.raises(tiny.Killed):
        reader.advance()
    monkeypatch.undo()
    died(reader)
    path = tmp_path / "mirror" / "journal.bin"
    path.write_bytes(chains.flip(path.read_bytes()))
    reopened = tiny.subscriber(store, tmp_path / "mirror")
    assert reopened.mirror.state is None
    reopened.advance()
    tiny.assert_holds(reopened, chains.TREES[2])


def test_bits_that_rot_on_the_readers_disk_are_found_and_fetched_again(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    name = next(iter(reader.mirror.view.specs))
    reader.mirror.view.writable(name).reshape(-1)[3] ^= 1
    assert reader.current() is None
    update = reader.advance()
    assert update is not None and update.version == 2
    tiny.assert_holds(reader, chains.TREES[2])


events = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.just(0), st.booleans()),
        st.tuples(st.just("kill trainer"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("read"), st.just(0), st.booleans()),
        st.tuples(st.just("damage"), st.sampled_from(sorted(range(len(chains.DAMAGES)))), st.booleans()),
    ),
    min_size=3,
    max_size=8,
)


# Killed between manifest and head, of a full version that is also a change: that one takes four writes.
@example(events=[("publish", 0, False)] * 2 + [("kill trainer", 3, True), ("read", 0, False)], full_every=2)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(events=events, full_every=st.integers(2, 5))
def test_whatever_happens_a_reader_holds_a_published_version_and_ends_at_the_head(
    events, full_every, tmp_path_factory
):
    directory = tmp_path_factory.mktemp("property")
    store = chains.mortal(f"property/{directory.name}")
    trainer = tiny.publisher(store, full_every=full_every)
    trainer.take_over()
    reader = tiny.subscriber(store, directory / "mirror")
    published: dict[int, int] = {}

    def put(number):
        # Noted before it happens: a trainer that dies may have moved the head, and says nothing.
        published[trainer.head.version + 1] = number
        chains.publish(trainer, number)

    for turn, (event, argument, flag) in enumerate(events):
        tree = turn % len(chains.TREES)
        if event == "publish":
            put(tree)
        elif event == "kill trainer":
            store.kill_at(argument, after=flag)
            with pytest.raises(tiny.Killed):
                put(tree)
            store.kill_at(0)
            trainer = tiny.publisher(store, full_every=full_every)
            trainer.take_over()
        elif event == "damage" and trainer.head.version > 0:
            version = max(1, trainer.head.version - int(flag))
            what = list(chains.DAMAGES)[argument]
            if chains.keys_of(store, version, chains.DAMAGES[what][0]):
                chains.damage(store, version, what)
        elif event == "read":
            try:
                reader.advance()
            except BrokenVersion as error:
                assert reader.broken, error
        if reader.mirror.state is not None:
            tiny.assert_holds(reader, chains.TREES[published[reader.mirror.state.ref.version]])
    reader.broken.clear()
    for number in (1, 2, 3):
        put(number)
        try:
            reader.advance()
        except BrokenVersion:
            continue
    tiny.assert_holds(reader, chains.TREES[3])
    assert reader.mirror.version == trainer.head.version
    trainer.close()
    reader.mirror.close()
