"""A version decoded by several processes is the version decoded by one: same files, same errors, bounded."""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

from rollout_bridge.delta import Group
from rollout_bridge.store import Store
from rollout_bridge.weights import blobs, chain, mirror, parallel, subscriber
from rollout_bridge.weights.blobs import Blobs
from rollout_bridge.weights.manifest import BrokenVersion
from rollout_bridge.weights.mirror import Mirror
from rollout_bridge.weights.subscriber import Subscriber
from tests.rollout_bridge.weights import tiny
from tests.running import runs

SECONDS = 120  # until a test that hangs says so


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Five versions in one-tensor to whole-layer objects: full, three deltas, full with its change, delta."""
    trees = [tiny.params()]
    store = tiny.open_store(tmp_path_factory.mktemp("decoders").name)
    trainer = tiny.publisher(store, full_every=4, object_bytes=2000)
    trainer.take_over()
    for number in range(1, 7):
        trees.append(tiny.step(trees[-1], number, paths_changed=0.8))
        trainer.publish(tiny.on_device(trees[-1]), step=number).result(300)
    trainer.close()
    return store, trees


@pytest.fixture(scope="module")
def workers():
    """Two processes for all tests: starting them is what takes time."""
    workers = parallel.Workers(2)
    yield workers
    workers.close()


def reader_of(store, directory, workers=None):
    reader = Subscriber(store, Mirror(directory), decoders=1, inline_bytes=0)
    if workers is not None:
        reader._workers = workers
    return reader


# Followed one by one; folded; a full version with a delta after it.
@pytest.mark.parametrize("stops", [(1, 2, 3), (1, 4), (6,)])
def test_one_process_and_several_write_the_same_bytes(stops, published, workers, tmp_path, monkeypatch):
    store, trees = published
    files = []
    monkeypatch.setattr(subscriber, "_BATCH_BYTES", 20_000)
    for helpers in (None, workers):
        reader = reader_of(store, tmp_path / f"{helpers}", helpers)
        for stop in stops:
            update = reader.advance(stop)
            assert update is not None and update.version == stop
        tiny.assert_holds(reader, trees[stops[-1]])
        held = {path.name: path.read_bytes() for path in sorted(reader.mirror.directory.iterdir())}
        files.append(held)
    assert files[0] == files[1]
    assert set(files[0]) == {"index.json", "lock", "run.json", "tensors.bin", "version.json"}


def moments(monkeypatch, name, count):
    """The owner dies at the `count`th call of what `name` says; the processes it started do not notice."""
    owner, attribute = {
        "write_whole": (mirror.files, "write_whole"),
        "sync_directory": (mirror.files, "sync_directory"),
        "replace": (mirror.os, "replace"),
        "unlink": (mirror.Path, "unlink"),
        "flush": (mirror.np.memmap, "flush"),
    }[name]
    original, lives = getattr(owner, attribute), itertools.count(count, -1)

    def dying(*args, **kwargs):
        if next(lives) == 0:
            raise tiny.Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, dying)


@pytest.mark.parametrize("moment", ["write_whole", "sync_directory", "replace", "unlink", "flush"])
def test_an_owner_killed_at_any_moment_of_a_journal_in_parts_is_one_version_again(
    moment, published, workers, tmp_path, monkeypatch
):
    store, trees = published
    monkeypatch.setattr(subscriber, "_BATCH_BYTES", 20_000)
    for count in itertools.count():  # dies at the first, second, ... call, until the update gets through
        reader = reader_of(store, tmp_path / f"{count}", workers)
        reader.advance(2)
        with monkeypatch.context() as patch:
            moments(patch, moment, count)
            try:
                reader.advance(3)
                break
            except tiny.Killed:
                reader.mirror._lock.close()
        reopened = reader_of(store, tmp_path / f"{count}")
        assert reopened.mirror.version in (2, 3)
        _ = reopened.run
        tiny.assert_holds(reopened, trees[reopened.mirror.version])
        assert not list(reopened.mirror.directory.glob("*.part*"))
        reopened.advance(3)
        tiny.assert_holds(reopened, trees[3])
        reopened.mirror.close()
    assert count > 0


@pytest.mark.parametrize("damage", ["flipped", "missing", "of another update"])
def test_a_damaged_part_is_not_believed(damage, published, workers, tmp_path, monkeypatch):
    """Found before the first bit is set: what would complete the version is lost, the mirror is emptied."""
    store, trees = published
    monkeypatch.setattr(subscriber, "_BATCH_BYTES", 20_000)
    reader = reader_of(store, tmp_path / "mirror", workers)
    reader.advance(2)
    with monkeypatch.context() as patch:
        patch.setattr(mirror.Mirror, "_redo_journal", lambda self: (_ for _ in ()).throw(tiny.Killed()))
        with pytest.raises(tiny.Killed):
            reader.advance(3)
    reader.mirror._lock.close()
    first, second, *_ = sorted(reader.mirror.directory.glob("*.part"))
    if damage == "flipped":
        content = bytearray(second.read_bytes())
        content[len(content) // 2] ^= 1
        second.write_bytes(content)
    elif damage == "missing":
        second.unlink()
    else:
        second.write_bytes(first.read_bytes())
    reopened = reader_of(store, tmp_path / "mirror")
    assert reopened.mirror.state is None and not list(reopened.mirror.directory.glob("*.part"))
    reopened.advance(3)
    tiny.assert_holds(reopened, trees[3])


def test_an_error_in_one_tensor_stops_the_update_and_names_it(published, workers, tmp_path, monkeypatch):
    """A manifest lies about one tensor's digest: found by another process, told by this one."""
    store, trees = published
    reader = reader_of(store, tmp_path / "mirror", workers)
    reader.advance(1)
    before = (reader.mirror.directory / "tensors.bin").read_bytes()
    monkeypatch.setattr(subscriber, "_BATCH_BYTES", 20_000)
    read = chain.read_manifest
    lied_about: list[str] = []

    def lying(*arguments):
        manifest = read(*arguments)
        if manifest.version != 2:
            return manifest
        name = sorted(name for name, entry in manifest.tensors.items() if entry.blobs)[9]
        entry = manifest.tensors[name].model_copy(update={"digest": "0" * 16})
        lied_about.append(name)
        return manifest.model_copy(update={"tensors": manifest.tensors | {name: entry}})

    monkeypatch.setattr(chain, "read_manifest", lying)
    reader._manifests.clear()
    with pytest.raises(BrokenVersion, match=r"version 2") as caught:
        reader.advance(2)
    assert lied_about[0] in next(iter(reader.broken.values())) and "digest" in caught.value.reason
    names = {path.name for path in reader.mirror.directory.iterdir()}
    assert names == {"index.json", "lock", "run.json", "tensors.bin", "version.json"}
    assert (reader.mirror.directory / "tensors.bin").read_bytes() == before
    assert reader.mirror.version == 1
    tiny.assert_holds(reader, trees[1])


def test_bits_that_rot_are_found_by_whoever_digests_them(published, workers, tmp_path):
    reader = reader_of(published[0], tmp_path / "mirror", workers)
    reader.advance(2)
    name = list(reader.mirror.view.specs)[11]
    reader.mirror.view.writable(name).reshape(-1)[0] ^= 1
    assert reader.current() is None and reader.mirror.state is None
    assert reader.advance(2) is not None
    tiny.assert_holds(reader, published[1][2])


def test_an_object_is_fetched_once_however_many_threads_ask_and_a_shared_blob_read_once(
    published, tmp_path, monkeypatch
):
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
    reader = reader_of(Watched.open(store.url), tmp_path / "mirror")
    reader.advance(1)
    asked.clear()
    read.clear()
    reader.advance(2)
    objects = [key for key in asked if key.endswith(".blob")]
    assert objects and len(objects) == len(set(objects))
    assert read and len(read) == len(set(read))
    tiny.assert_holds(reader, trees[2])

    [link, *_] = [link for link in reader._manifests.values() if link.version == 2]
    pieces = [piece for entry in link.tensors.values() for piece in entry.blobs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places wherever they can
    try:
        for _ in range(50):
            fetched = Blobs(Watched.open(store.url))
            asked.clear()
            piece_of = functools.partial(fetched.piece, link.ref)
            with ThreadPoolExecutor(8) as threads:
                contents = list(threads.map(piece_of, 4 * pieces))
            fetched.close()
            assert contents == 4 * contents[: len(pieces)]
            assert sorted(asked) == sorted(objects)
    finally:
        sys.setswitchinterval(interval)


def test_arrays_of_a_blob_are_decoded_together_and_the_one_that_is_wrong_is_named(
    published, tmp_path, monkeypatch
):
    store, trees = published
    reader = reader_of(store, tmp_path / "mirror")
    reader.advance(1)
    asked = []
    changes_of = Group.changes_of

    def watched(self, numbers, olds):
        asked.append(len(numbers))
        return changes_of(self, numbers, olds)

    monkeypatch.setattr(Group, "changes_of", watched)
    reader.advance(2)
    tiny.assert_holds(reader, trees[2])
    [link, *_] = [link for link in reader._manifests.values() if link.version == 2]
    shared = {
        name: piece
        for name, entry in link.tensors.items()
        for piece in entry.blobs
        if piece.member is not None
    }
    assert sum(asked) == len(shared) > len(asked) == len({piece.key for piece in shared.values()})

    name, other = list(shared)[5], list(shared)[6]
    entry = link.tensors[name]
    wrong = entry.blobs[0].model_copy(update={"member": 10**6})
    tensors = link.tensors | {name: entry.model_copy(update={"blobs": (wrong,)})}
    fetched = Blobs(store)
    changes = blobs.Changes(fetched)
    lying = chain.Link(link.ref, link.model_copy(update={"tensors": tensors}), whole=False)
    olds = {each: np.zeros(tensors[each].spec.shape, tensors[each].spec.bits) for each in (name, other)}
    changes.ahead([(lying.ref, tensors[each].blobs[0], olds[each]) for each in (name, other)])
    with pytest.raises(BrokenVersion, match=f"tensor {re.escape(name)}: .*1000000"):
        chain.fold([lying], changes, name, olds[name], 0)
    fetched.close()


def slept(number):
    """Long enough for others to begin, if anything lets them."""
    time.sleep(0.01)
    return number, os.getpid()


def failing(number):
    if number == 5:
        raise ValueError("item 5")
    return number


def killed(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def killed_first(number):
    """Before the others, most of which nobody has begun then."""
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    return number


def test_results_come_in_order_within_the_limit_and_an_item_over_it_alone(workers):
    """Costs 1..4 and one of 100 under a limit of 8: what is begun is counted as items are asked for."""
    costs = [1 + number % 4 for number in range(60)]
    costs[30] = 100
    begun: list[int] = []
    found: list[int] = []
    most = 0

    def items():
        for number in range(60):
            yield number
            begun.append(number)
            nonlocal most
            held = sum(costs[each] for each in begun) - sum(costs[each] for each in found)
            assert held <= 8 or begun[len(found) :] == [30]
            most = max(most, held if held <= 8 else 0)

    at_work = set()
    for number, process in workers.in_order(slept, items(), here=False, cost=costs.__getitem__, limit=8):
        found.append(number)
        at_work.add(process)
    assert found == list(range(60)) and most > 4
    assert os.getpid() not in at_work and 1 <= len(at_work) <= 2


@pytest.mark.parametrize("here", [True, False])
def test_a_failure_is_raised_in_its_place_and_nothing_is_begun_after_it(here, workers):
    asked, found = [], []
    items = (asked.append(number) or number for number in range(1000))
    with pytest.raises(ValueError, match="item 5"):
        for number in workers.in_order(failing, items, here=here, cost=lambda number: 1, limit=1000):
            found.append(number)
    assert found == list(range(5)) and len(asked) <= 5 + 1 + 4 * 2 + 1


def test_a_process_that_dies_is_trouble_that_passes():
    """OSError: an agent tries again, with processes that are new."""
    workers = parallel.Workers(2)
    with pytest.raises(OSError, match="a decoding process died"):
        list(workers.in_order(killed, range(5), here=False, cost=lambda number: 1, limit=9))
    assert list(workers.in_order(failing, range(3), here=False, cost=lambda number: 1, limit=9)) == [0, 1, 2]
    workers.close()


@pytest.mark.timeout(SECONDS)
def test_items_that_wait_when_a_process_dies_are_failed_by_the_pool_and_not_cancelled(monkeypatch):
    """The first failure is heard while the pool, in a thread of its own, has others still to fail."""
    fail = Future.set_exception

    def slowly(self, error):
        fail(self, error)
        if isinstance(error, BrokenProcessPool):
            time.sleep(0.1)

    monkeypatch.setattr(Future, "set_exception", slowly)
    workers = parallel.Workers(2)
    with pytest.raises(OSError, match="a decoding process died"):
        list(workers.in_order(killed_first, range(9), here=False, cost=lambda number: 1, limit=99))
    workers.close()


def test_what_a_broken_pool_has_forgotten_is_not_waited_for(monkeypatch):
    class Broken(Executor):
        def submit(self, *arguments, **options):
            raise BrokenProcessPool("a process died")

    monkeypatch.setattr(parallel, "_LOOK_SECONDS", 0.01)
    with pytest.raises(BrokenProcessPool):
        parallel.result(Broken(), Future())


def test_what_a_pool_still_has_when_it_is_shut_down_is_waited_for(monkeypatch):
    monkeypatch.setattr(parallel, "_LOOK_SECONDS", 0.01)
    let = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(let.wait, 300)
        pool.shutdown(wait=False)
        threading.Timer(0.1, let.set).start()
        assert parallel.result(pool, future)


PROGRAM = """
import os, sys, time
from rollout_bridge.weights.parallel import Workers
from tests.rollout_bridge.weights.test_decoders import slept

if __name__ == "__main__":
    found = Workers(2).in_order(slept, range(40), here=False, cost=lambda number: 0, limit=0)
    print(*{process for _, process in found}, flush=True)
    time.sleep(3600)
"""


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    """SIGKILL leaves a parent no time to say so."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, tmp_path / "program.py"], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        processes = [int(process) for process in parent.stdout.readline().split()]
        assert processes and all(runs(process) for process in processes)
        parent.kill()
    deadline = time.monotonic() + SECONDS
    while any(runs(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_settings_are_checked(published, tmp_path):
    with pytest.raises(ValueError, match="decoders: 0"):
        tiny.subscriber(published[0], tmp_path / "mirror", decoders=0)
    assert parallel.default_count() >= 1
