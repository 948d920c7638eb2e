"""A version decoded on several threads is the version decoded on one: same files, same errors, bounded."""

import threading

import pytest

from rollout_bridge.store import Store
from rollout_bridge.weights import blobs, chain, journal, parallel
from rollout_bridge.weights.manifest import BrokenVersion
from rollout_bridge.weights.mirror import Mirror
from rollout_bridge.weights.subscriber import Subscriber
from tests.rollout_bridge.weights import tiny

SECONDS = 20  # until a test that hangs says so


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Five versions in one-tensor to whole-layer objects: full, three deltas, full with its change, delta."""
    trees = [tiny.params()]
    store = tiny.open_store(tmp_path_factory.mktemp("decoders").name)
    trainer = tiny.publisher(store, full_every=4, object_bytes=2000)
    trainer.take_over()
    for number in range(1, 7):
        trees.append(tiny.step(trees[-1], number, paths_changed=0.8))
        trainer.publish(tiny.on_device(trees[-1]), step=number).result(60)
    trainer.close()
    return store, trees


def reader_of(store, directory, decoders, **options):
    return Subscriber(store, Mirror(directory, threads=decoders), decoders=decoders, **options)


# Followed one by one; folded; a full version with a delta after it.
@pytest.mark.parametrize("stops", [(1, 2, 3), (1, 4), (6,)])
def test_one_thread_and_four_write_the_same_bytes(stops, published, tmp_path, monkeypatch):
    store, trees = published
    journals: list[bytes] = []
    write = journal.write

    def kept(path, *arguments):
        write(path, *arguments)
        journals.append(path.read_bytes())

    monkeypatch.setattr(journal, "write", kept)
    files = []
    for decoders in (1, 4):
        journals.clear()
        reader = reader_of(store, tmp_path / f"{decoders}", decoders)
        for stop in stops:
            update = reader.advance(stop)
            assert update is not None and update.version == stop
        tiny.assert_holds(reader, trees[stops[-1]])
        names = ("tensors.bin", "version.json", "index.json")
        files.append([(reader.mirror.directory / name).read_bytes() for name in names] + journals)
        assert len(journals) == len(stops) - 1
    assert files[0] == files[1]


def test_an_error_in_one_tensor_stops_the_update_and_names_it(published, tmp_path, monkeypatch):
    """The 9th of the tensors that change cannot be applied: what version 2 holds is still version 1."""
    store, trees = published
    reader = reader_of(store, tmp_path / "mirror", 4)
    reader.advance(1)
    before = (reader.mirror.directory / "tensors.bin").read_bytes()
    fold, begun = chain.fold, []

    def failing(links, held, name, *arguments):
        begun.append(name)
        if len(begun) == 9:
            reason = f"tensor {name}: not what it should be"
            raise BrokenVersion(links[-1].ref, links[-1].ref.key, reason)
        return fold(links, held, name, *arguments)

    monkeypatch.setattr(chain, "fold", failing)
    with pytest.raises(BrokenVersion, match=r"version 2"):
        reader.advance(2)
    [reason] = reader.broken.values()
    assert begun[8] in reason and "not what it should be" in reason
    assert sorted(path.name for path in reader.mirror.directory.iterdir()) == [
        "index.json",
        "lock",
        "run.json",
        "tensors.bin",
        "version.json",
    ]
    assert (reader.mirror.directory / "tensors.bin").read_bytes() == before
    assert reader.mirror.version == 1
    tiny.assert_holds(reader, trees[1])


def test_an_object_is_fetched_and_a_shared_blob_read_once_for_all_threads(published, tmp_path, monkeypatch):
    store, trees = published
    asked, read = [], []
    decode_group = blobs.delta.decode_group

    class Watched(Store):
        def read(self, key):
            asked.append(key)
            return super().read(key)

    def watched_group(*arguments):
        read.append(arguments[0])
        return decode_group(*arguments)

    monkeypatch.setattr(blobs.delta, "decode_group", watched_group)
    reader = reader_of(Watched.open(store.url), tmp_path / "mirror", 4)
    reader.advance(1)
    asked.clear()
    read.clear()
    reader.advance(2)
    objects = [key for key in asked if key.endswith(".blob")]
    assert objects and len(objects) == len(set(objects))
    assert read and len(read) == len(set(read))
    tiny.assert_holds(reader, trees[2])


def test_results_come_in_order_within_the_limit_and_an_item_over_it_alone():
    """Costs 1..4 and one of 100 under a limit of 8: oracle is a count kept under a lock."""
    lock, held, most, together = threading.Lock(), 0, 0, []
    costs = [1 + number % 4 for number in range(60)]
    costs[30] = 100

    def work(number):
        nonlocal held, most
        with lock:
            held += costs[number]
            if costs[number] == 100:
                together.append(held)
            most = max(most, held if held < 100 else 0)
        return number

    found = []
    for number in parallel.in_order(work, range(60), threads=4, cost=costs.__getitem__, limit=8):
        found.append(number)
        with lock:
            held -= costs[number]
    assert found == list(range(60))
    assert 4 < most <= 8 and together == [100]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_is_raised_in_its_place_and_nothing_goes_on_after_it(threads):
    begun, ended = [], []

    def work(number):
        begun.append(number)
        if number == 5:
            raise ValueError("item 5")
        ended.append(number)
        return number

    found = []
    with pytest.raises(ValueError, match="item 5"):
        for number in parallel.in_order(
            work, range(1000), threads=threads, cost=lambda number: 1, limit=1000
        ):
            found.append(number)
    assert found == list(range(5))
    at_the_end = len(begun)
    assert sorted(ended) == sorted(set(begun) - {5}) and at_the_end < 1000


def test_items_run_beside_each_other_and_a_caller_that_stops_ends_them():
    """Two items that wait for each other can only end together."""
    both = threading.Barrier(2, timeout=SECONDS)
    begun = []

    def work(number):
        begun.append(number)
        if number < 2:
            both.wait()
        return number

    results = parallel.in_order(work, range(1000), threads=2, cost=lambda number: 0, limit=0)
    assert next(results) == 0
    results.close()
    assert len(begun) < 1000


def test_settings_are_checked(published, tmp_path):
    with pytest.raises(ValueError, match="decoders: 0"):
        tiny.subscriber(published[0], tmp_path / "mirror", decoders=0)
    assert 1 <= parallel.default_threads() <= 32
