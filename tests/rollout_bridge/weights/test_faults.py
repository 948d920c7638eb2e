"""Whoever dies, whatever breaks: a reader serves one published version whole, and comes to the head again."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_bridge.store import Store
from rollout_bridge.weights import chain, mirror
from rollout_bridge.weights import run as runs
from rollout_bridge.weights.manifest import LATEST_KEY, QUARANTINE_PREFIX, BrokenVersion, Kind
from rollout_bridge.weights.publisher import Superseded
from tests.rollout_bridge.weights import tiny

TREES = [tiny.params()]
for _number in range(1, 8):
    TREES.append(tiny.step(TREES[-1], _number))


def mortal(name: str) -> tiny.Mortal:
    tiny.open_store(name)
    return tiny.Mortal.open(f"memory://{name}", probe=False)


def publish(trainer, number: int):
    """Version `number` holds TREES[number]."""
    return trainer.publish(tiny.on_device(TREES[number]), step=number).result(60)


def chain_of(store: Store, versions: int, **options):
    trainer = tiny.publisher(store, **options)
    trainer.take_over()
    for number in range(trainer.head.version + 1, versions + 1):
        publish(trainer, number)
    return trainer


def keys_of(store: Store, version: int, ending: str) -> list[str]:
    return [key for key in store.list(f"weights/versions/{version:08d}/") if key.endswith(ending)]


# Writes of one publication by one process: the blobs, the manifest, the pointer.
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_trainer_killed_at_any_write_leaves_the_old_head_or_the_new_one(write, after, tmp_path):
    store = mortal(tmp_path.name)
    trainer = chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    store.kill_at(write, after=after)
    with pytest.raises(tiny.Killed):
        publish(trainer, 3)
    assert store.keys[-1].endswith((".blob", "manifest.json", "latest")[write - 1])
    moved = write == 3 and after
    update = reader.advance()
    assert (update is not None) == moved
    tiny.assert_holds(reader, TREES[3 if moved else 2])

    store.kill_at(0)
    restarted = tiny.publisher(store)
    head = restarted.take_over()
    assert (head.version, head.incarnation, head.step) == ((3, 2, 3) if moved else (2, 2, 2))
    # Restart is redo: the step after the checkpoint is trained again, then the chain goes on from the head.
    assert restarted.verify_head(tiny.on_device(TREES[head.version]))
    for number in range(head.version + 1, 5):
        assert publish(restarted, number).kind is Kind.DELTA
    assert reader.advance() is not None
    tiny.assert_holds(reader, TREES[4])
    assert not reader.broken
    restarted.close()


def test_a_publication_that_failed_before_its_manifest_may_be_tried_again(tmp_path):
    store = tiny.open_store(tmp_path.name)
    flaky = tiny.Unreachable.open(store.url, probe=False)
    trainer = chain_of(flaky, 1)
    flaky.failing = True
    with pytest.raises(RuntimeError, match="unreachable"):
        publish(trainer, 2)
    flaky.failing = False
    assert publish(trainer, 3).version == 2
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, TREES[3])
    trainer.close()


def test_the_older_of_two_trainers_is_fenced_and_names_its_successor(tmp_path):
    store = tiny.open_store(tmp_path.name)
    older = chain_of(store, 2)
    newer = tiny.publisher(store)
    assert newer.take_over().incarnation == 2
    with pytest.raises(Superseded, match=r"incarnation 1 .* superseded by incarnation 2 .*pid \d+") as caught:
        publish(older, 3)
    assert caught.value.successor == newer.head
    with pytest.raises(RuntimeError, match="restart the trainer"):
        publish(older, 3)
    assert publish(newer, 3).incarnation == 2
    run = runs.load(store)
    assert run is not None and run.incarnation == 2
    reader = tiny.subscriber(store, tmp_path / "mirror")
    assert reader.advance() is not None
    tiny.assert_holds(reader, TREES[3])


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
    trainer = chain_of(store, 1)
    store.armed = True
    with pytest.raises(Superseded):
        publish(trainer, 2)
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


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = {
    "truncated blob": (".blob", lambda data: data[:-3]),
    "flipped bit in a blob": (".blob", flip),
    "missing blob": (".blob", None),
    "missing manifest": ("manifest.json", None),
    "flipped bit in a manifest": ("manifest.json", flip),
    "a manifest that is no JSON": ("manifest.json", lambda data: b"{"),
}


def damage(store: Store, version: int, what: str) -> None:
    ending, change = DAMAGES[what]
    key = keys_of(store, version, ending)[0]  # of a full version the bits, before its change
    data = store.read(key)
    assert data is not None
    if change is None:
        store.delete(key)
    else:
        store.put(key, change(data))


@pytest.mark.parametrize("what", DAMAGES)
def test_a_broken_delta_is_passed_by_the_next_full_version(what, tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = chain_of(store, 4)
    damage(store, 3, what)
    reader = tiny.subscriber(store, tmp_path / "mirror", name="reader")
    with_manifest = "blob" in what  # without a manifest nothing says what version 2 is; the full one is known
    update = reader.advance()
    assert update is not None and update.version == (2 if with_manifest else 1)
    tiny.assert_holds(reader, TREES[update.version])
    with pytest.raises(BrokenVersion, match="version 3"):
        reader.advance()
    assert store.list(QUARANTINE_PREFIX) == [f"{QUARANTINE_PREFIX}00000003-000001.json"]

    assert publish(trainer, 5).kind is Kind.FULL
    assert publish(trainer, 6).kind is Kind.DELTA
    update = reader.advance()
    assert update is not None and update.version == 6
    assert update.changed == reader.mirror.view.specs.keys()
    tiny.assert_holds(reader, TREES[6])
    assert reader.fallbacks == 1
    trainer.close()


@pytest.mark.parametrize("what", ["flipped bit in a blob", "missing manifest"])
def test_a_trainer_whose_chain_is_broken_starts_a_new_one(what, tmp_path):
    store = tiny.open_store(tmp_path.name)
    chain_of(store, 3).close()
    damage(store, 2, what)
    restarted = tiny.publisher(store)
    assert restarted.take_over().version == 3
    with pytest.raises(RuntimeError, match="nothing to compare with at version 3"):
        restarted.verify_head(tiny.on_device(TREES[3]))
    assert publish(restarted, 4).kind is Kind.FULL
    reader = tiny.subscriber(store, tmp_path / "mirror")
    assert reader.advance() is not None
    tiny.assert_holds(reader, TREES[4])


def test_a_broken_full_version_is_passed_on_the_chain_before_it(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chain_of(store, 5, full_every=3)  # 1 and 4 are full
    damage(store, 4, "flipped bit in a blob")
    reader = tiny.subscriber(store, tmp_path / "mirror")
    update = reader.advance()
    assert update is not None and update.version == 3
    tiny.assert_holds(reader, TREES[3])


def test_a_blob_that_is_wrong_once_is_fetched_again(tmp_path):
    class Noisy(Store):
        noise = 2

        def read(self, key):
            data = super().read(key)
            if key.endswith(".blob") and self.noise and data is not None:
                self.noise -= 1
                return flip(data)
            return data

    tiny.open_store(tmp_path.name)
    store = Noisy.open(f"memory://{tmp_path.name}")
    chain_of(store, 1)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    assert reader.advance() is not None
    tiny.assert_holds(reader, TREES[1])
    assert store.noise == 0 and not reader.broken and not store.list(QUARANTINE_PREFIX)


def test_a_lying_digest_is_caught_before_the_mirror_moves(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chain_of(store, 2)
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
    tiny.assert_holds(reader, TREES[1])


def test_a_manifest_of_another_run_is_refused(tmp_path):
    store, other = tiny.open_store(tmp_path.name), tiny.open_store(f"{tmp_path.name}-other")
    chain_of(store, 1)
    chain_of(other, 1)
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
    chain_of(store, 2)
    chain_of(other, 1)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    reader.mirror.close()
    moved = tiny.subscriber(other, tmp_path / "mirror")
    update = moved.advance()
    assert update is not None and update.version == 1
    tiny.assert_holds(moved, TREES[1])


def test_a_stale_pointer_moves_nobody_back(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = chain_of(store, 2)
    stale = store.read(LATEST_KEY)
    assert stale is not None
    publish(trainer, 3)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    store.put(LATEST_KEY, stale)
    assert reader.advance() is None
    assert reader.mirror.version == 3


def test_a_pinned_version_is_reached_even_before_the_newest_full_one(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chain_of(store, 6, full_every=3)  # 1 and 4 are full
    reader = tiny.subscriber(store, tmp_path / "mirror")
    for version in (3, 5):
        update = reader.advance(version)
        assert update is not None and update.version == version
        tiny.assert_holds(reader, TREES[version])
    assert reader.advance(5) is None
    update = reader.advance(9)
    assert update is not None and update.version == 6


def died(reader):
    """The process is gone: only its files are left."""
    reader.mirror._lock.close()


@pytest.mark.parametrize("moment", ["replace_file", "sync_directory", "replace", "unlink", "flush"])
@pytest.mark.parametrize("full", [True, False])
def test_a_reader_killed_at_any_moment_of_an_update_is_one_version_again(moment, full, tmp_path, monkeypatch):
    store = tiny.open_store(tmp_path.name)
    chain_of(store, 3, full_every=2 if full else 100)  # 3 is full, or a delta
    owner, name = {
        "replace_file": (mirror.journal, "replace_file"),
        "sync_directory": (mirror.journal, "sync_directory"),
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
        tiny.assert_holds(reopened, TREES[reopened.mirror.version])
        assert reopened.mirror.verify()
        reopened.advance()
        tiny.assert_holds(reopened, TREES[3])
        reopened.mirror.close()
    assert count > 0


def test_a_damaged_journal_is_not_believed(tmp_path, monkeypatch):
    store = tiny.open_store(tmp_path.name)
    chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance(1)
    monkeypatch.setattr(mirror.Mirror, "_redo_journal", lambda self: (_ for _ in ()).throw(tiny.Killed()))
    with pytest.raises(tiny.Killed):
        reader.advance()
    monkeypatch.undo()
    died(reader)
    path = tmp_path / "mirror" / "journal.bin"
    path.write_bytes(flip(path.read_bytes()))
    reopened = tiny.subscriber(store, tmp_path / "mirror")
    assert reopened.mirror.state is None
    reopened.advance()
    tiny.assert_holds(reopened, TREES[2])


def test_bits_that_rot_on_the_readers_disk_are_found_and_fetched_again(tmp_path):
    store = tiny.open_store(tmp_path.name)
    chain_of(store, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    name = next(iter(reader.mirror.view.specs))
    reader.mirror.view.writable(name).reshape(-1)[3] ^= 1
    assert reader.current() is None
    update = reader.advance()
    assert update is not None and update.version == 2
    tiny.assert_holds(reader, TREES[2])


events = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.just(0), st.booleans()),
        st.tuples(st.just("kill trainer"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("read"), st.just(0), st.booleans()),
        st.tuples(st.just("damage"), st.sampled_from(sorted(range(len(DAMAGES)))), st.booleans()),
    ),
    min_size=3,
    max_size=8,
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=events, full_every=st.integers(2, 5))
def test_whatever_happens_a_reader_holds_a_published_version_and_ends_at_the_head(
    events, full_every, tmp_path_factory
):
    directory = tmp_path_factory.mktemp("property")
    store = mortal(f"property/{directory.name}")
    trainer = tiny.publisher(store, full_every=full_every)
    trainer.take_over()
    reader = tiny.subscriber(store, directory / "mirror")
    published: dict[int, int] = {}

    def put(number):
        published[trainer.publish(tiny.on_device(TREES[number]), step=number).result(60).version] = number

    for turn, (event, argument, flag) in enumerate(events):
        tree = turn % len(TREES)
        if event == "publish":
            put(tree)
        elif event == "kill trainer":
            store.kill_at(argument, after=flag)
            with pytest.raises(tiny.Killed):
                put(tree)
            store.kill_at(0)
            if argument == 3 and flag:
                published[trainer.head.version] = tree
            trainer = tiny.publisher(store, full_every=full_every)
            trainer.take_over()
        elif event == "damage" and trainer.head.version > 0:
            version = max(1, trainer.head.version - int(flag))
            what = list(DAMAGES)[argument]
            if keys_of(store, version, DAMAGES[what][0]):
                damage(store, version, what)
        elif event == "read":
            try:
                reader.advance()
            except BrokenVersion as error:
                assert reader.broken, error
        if reader.mirror.state is not None:
            tiny.assert_holds(reader, TREES[published[reader.mirror.state.ref.version]])
    reader.broken.clear()
    for number in (1, 2, 3):
        put(number)
        try:
            reader.advance()
        except BrokenVersion:
            continue
    tiny.assert_holds(reader, TREES[3])
    assert reader.mirror.version == trainer.head.version
    trainer.close()
    reader.mirror.close()
