"""Laws of the store: conditional writes are exclusive, and a store without them is refused on opening."""

import os
import subprocess
import sys
import threading

import pytest

import rollout_bridge.store as store_module
from rollout_bridge import file_lock
from rollout_bridge.store import Patience, Store, StoreAway, StoreError
from rollout_bridge.waiting import Interrupted
from tests.rollout_bridge import store_racer as racer_program


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    url = f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/store"
    return Store.open(url)


def test_create_happens_once(store):
    assert store.create("a/b.json", b"one")
    assert not store.create("a/b.json", b"two")
    assert store.read("a/b.json") == b"one"


def test_swap_needs_the_current_generation(store):
    _, absent = store.read_with_generation("pointer")
    assert store.swap("pointer", b"1", absent)
    _, first = store.read_with_generation("pointer")
    assert store.swap("pointer", b"2", first)
    assert not store.swap("pointer", b"3", first)
    assert not store.swap("pointer", b"3", absent)
    assert store.read("pointer") == b"2"


def test_generation_of_an_old_content_stays_stale_when_the_content_returns(store):
    store.put("pointer", b"x")
    _, before = store.read_with_generation("pointer")
    store.put("pointer", b"y")
    store.put("pointer", b"x")
    assert not store.swap("pointer", b"z", before)


def test_one_of_many_concurrent_creators_wins(store):
    wins = []
    threads = [
        threading.Thread(target=lambda i=i: store.create("claim", str(i).encode()) and wins.append(i))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert store.read("claim") == str(wins[0]).encode()


def test_list_is_sorted_and_by_prefix(store):
    for key in ("b/2", "b/10", "a/1", "bc"):
        store.put(key, b"")
    assert store.list("b/") == ["b/10", "b/2"]
    assert store.list("b") == ["b/10", "b/2", "bc"]
    assert store.list() == ["a/1", "b/10", "b/2", "bc"]
    store.delete("b/2")
    store.delete("never/was")
    assert store.list("b/") == ["b/10"]


def test_opening_leaves_nothing_behind(store):
    assert store.list() == []


def test_json_round_trip_and_damage(store):
    assert store.create_json("x.json", {"b": [1, 2.5], "a": None})
    assert not store.create_json("x.json", {})
    value, generation = store.read_json_with_generation("x.json")
    assert value == {"a": None, "b": [1, 2.5]}
    assert store.swap_json("x.json", {"a": 1}, generation)
    assert store.read_json("missing.json") is None
    store.put("x.json", b"{torn")
    with pytest.raises(StoreError, match=r"x\.json holds .*expected JSON"):
        store.read_json("x.json")


def test_memory_stores_of_one_name_are_one_store(tmp_path):
    Store.open(f"memory://{tmp_path.name}").put("k", b"v")
    assert Store.open(f"memory://{tmp_path.name}/").read("k") == b"v"
    assert Store.open(f"memory://{tmp_path.name}-other").read("k") is None


BAD_KEYS = ["", "../a", "/a", "a//b", "a/../b", "a b", "a/.hidden", "a/", "x.__lock", "a\n"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_could_leave_the_store_are_refused(store, key):
    with pytest.raises(StoreError, match="is not a key"):
        store.put(key, b"")


def test_a_swap_without_condition_is_refused(store):
    with pytest.raises(StoreError, match="unconditional"):
        store.swap("k", b"", b"")


ABSENT = Store.open("memory://absent").read_with_generation("k")[1]


class IgnoresConditions(Store):
    """A bucket that accepts If-Match and If-None-Match headers and ignores them."""

    def _write(self, key, data, generation):
        return super()._write(key, data, None)


class IgnoresIfMatch(Store):
    """Honours create-if-absent only, as some S3 look-alikes do."""

    def _write(self, key, data, generation):
        return super()._write(key, data, generation if generation == ABSENT else None)


class RefusesIfMatch(Store):
    """Never swaps."""

    def _write(self, key, data, generation):
        return b"" if generation not in (None, ABSENT) else super()._write(key, data, generation)


class ReadsTheBefore(Store):
    """A bucket behind a cache: conditions hold, but a read returns what was there before."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.before = {}

    def read(self, key):
        return self.before.get(key)

    def _write(self, key, data, generation):
        before = self.read_with_generation(key)[0]
        moved = super()._write(key, data, generation)
        if moved:
            self.before[key] = before
        return moved


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReadsTheBefore, "reads b'first' after b'third' was written"),
        (IgnoresConditions, "created the existing key .* again"),
        (IgnoresIfMatch, "stale generation"),
        (RefusesIfMatch, "with the current generation"),
    ],
)
def test_a_store_that_ignores_conditions_is_refused(kind, message, tmp_path):
    with pytest.raises(StoreError, match=message):
        kind.open(f"memory://{tmp_path.name}")


def test_wrong_places_are_named(tmp_path):
    with pytest.raises(StoreError, match=r"no/such/run.*parent directory .*does not exist.*create it"):
        Store.open(f"{tmp_path}/no/such/run")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is a file, expected a directory"):
        Store.open(f"file://{tmp_path}/file")
    with pytest.raises(StoreError, match="scheme 'ftp' is unknown"):
        Store.open("ftp://host/run")
    with pytest.raises(StoreError, match="absolute path"):
        Store.open("file://relative/run")


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "probes").write_text("a file where a directory is needed")
    with pytest.raises(StoreError, match=r"store file://.*probes/.*failed.*this process may use it"):
        Store.open(f"{tmp_path}/store")


def test_two_that_open_a_new_store_at_once_both_get_it(tmp_path, monkeypatch):
    """The other one creates the directory right after this one has seen that it is not there."""
    path, isdir = tmp_path / "store", os.path.isdir

    def seen_before(asked):
        found = isdir(asked)
        path.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr("rollout_bridge.store.os.path.isdir", seen_before)
    assert Store.open(str(path)).create_json("a.json", {})


class Away(Store):
    """Any store but for calls of one kind, which fail so often; `arrives`: a write is there all the same."""

    left, verb, arrives = 0, "read", False

    def _try(self, verb, key, start):
        if verb == self.verb and self.left:
            self.left -= 1
            if self.arrives:
                super()._try(verb, key, start)
            raise StoreAway(f"store {self.url}: {verb} of {key!r} failed: injected")
        return super()._try(verb, key, start)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(store_module, "SLOWEST_RETRY_SECONDS", 0.02)


def patient(tmp_path, *, seconds: float = 300.0, grace: float = 300.0, interrupted=lambda: False) -> Away:
    store = Away.open(f"memory://{tmp_path.name}", probe=False)
    return store.patient(Patience(seconds=seconds, grace=grace, interrupted=interrupted))


def test_a_store_that_is_away_is_waited_for(tmp_path, quick, caplog) -> None:
    store = patient(tmp_path)
    store.put("a", b"1")
    store.left = 3
    assert store.read("a") == b"1" and store.left == 0
    assert "Trying again for up to 300 s" in caplog.text and "is back" in caplog.text
    impatient = patient(tmp_path, seconds=0.05)
    impatient.left = 10**6
    with pytest.raises(StoreError, match=r"waited 0.05 s for store memory://.* to be back; .*injected"):
        impatient.read("a")


def test_a_signal_ends_the_wait_for_a_store(tmp_path) -> None:
    """After the first try; with the store there, calls may still end for a while."""
    asked = [False]
    store = patient(tmp_path, interrupted=lambda: asked[0])
    store.put("a", b"1")
    asked[0] = True
    assert store.read("a") == b"1"
    store.left = 10**6
    with pytest.raises(Interrupted):
        store.read("a")
    assert store.left == 10**6 - 1
    hurried = patient(tmp_path, grace=-1.0, interrupted=lambda: asked[0])
    with pytest.raises(Interrupted):
        hurried.read("a")
    asked[0] = False
    assert hurried.read("a") == b"1"


@pytest.mark.parametrize("arrives", [False, True], ids=["not-written", "written"])
def test_a_conditional_write_that_is_tried_again_is_neither_lost_nor_refused(
    tmp_path, quick, arrives
) -> None:
    """If only its answer was lost the second try is refused, and the content says that the first arrived."""
    store = patient(tmp_path)
    store.verb, store.arrives = "write", arrives
    store.left = 1
    assert store.create("a", b"mine") and store.read("a") == b"mine"
    _, generation = store.read_with_generation("a")
    Store.open(store.url, probe=False).put("a", b"theirs")
    store.left = 1
    store.arrives = False
    assert not store.swap("a", b"mine again", generation) and store.read("a") == b"theirs"


KINDS_OF_KEYS = [
    "run.json",
    "control/state.json",
    "control/credits.json",
    "weights/latest",
    "weights/versions/00000001/000001/manifest.json",
    "weights/versions/00000001/000001/p00000-0.blob",
    "weights/versions/00000001/000001/part-00000.json",
    "weights/quarantine/00000001-000001.json",
    "weights/acks/host.json",
    "trajectories/writer/00000001.parquet",
    "plans/00000001.json",
    "prompts/claims/00000001.json",
    "evaluations/one/result.json",
]


@pytest.mark.parametrize("key", KINDS_OF_KEYS)
def test_a_write_does_not_depend_on_what_a_dead_writer_left(key, tmp_path):
    """TensorStore may write the next value into KEY.__lock: what is there is longer than that value."""
    store = Store.open(f"{tmp_path}/store")
    stale = tmp_path / "store" / f"{key}.__lock"
    stale.parent.mkdir(parents=True, exist_ok=True)
    for write in (
        store.create,
        store.put,
        lambda *item: store.swap(*item, store.read_with_generation(key)[1]),
    ):
        stale.write_bytes(b"x" * 300)
        write(key, b'{"short":1}')
        assert store.read(key) == b'{"short":1}'
        assert store.list() == [key]
    stale.write_bytes(b"x" * 300)
    store.delete(key)
    assert store.read(key) is None and store.list() == []


def racers(url: str, count: int, increments: int) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.rollout_bridge.store_racer",
                url,
                f"racer-{number}",
                str(increments),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def test_of_racing_processes_one_wins_each_key_and_no_increment_is_lost(tmp_path):
    """4 processes add 1 fifty times each: the counter is 200, and each value was written by one of them."""
    store = Store.open(f"{tmp_path}/store")
    lines = [line for racer in racers(store.url, 4, 50) for line in racer.communicate()[0].splitlines()]
    assert sorted(int(line.split()[1]) for line in lines if line.startswith("swap")) == list(range(1, 201))
    assert sorted(line.split()[1] for line in lines if line.startswith("create")) == store.list("prompts/")
    assert store.read_json(racer_program.COUNTER)["count"] == 200


def test_writers_killed_at_any_moment_leave_whole_values_and_free_keys(tmp_path):
    """After each kill -9: every key holds one of the values a writer made for it, and can be written."""
    store = Store.open(f"{tmp_path}/store")
    count = 0
    for round_ in range(6):
        killed = racers(store.url, 2, 10**6)
        for racer in killed:
            assert racer.stdout is not None
            for _ in range(10 + 7 * round_):  # somewhere in the middle of its next write
                racer.stdout.readline()
        for racer in killed:
            racer.kill()
            racer.communicate()
        for key in store.list():
            found = store.read_json(key)
            assert store.read(key) == racer_program.value(found["count"], found["by"])
        reached = store.read_json(racer_program.COUNTER)["count"]
        assert reached > count
        count = reached + 1
        _, generation = store.read_with_generation(racer_program.COUNTER)
        assert store.swap(racer_program.COUNTER, racer_program.value(count, "after"), generation)


def test_a_lock_that_is_held_is_waited_for_until_the_timeout(tmp_path):
    """The message names the key; once the holder is gone the same write is done."""
    store = Store.open(f"{tmp_path}/store", timeout=0.2)
    release = file_lock.acquire(f"{tmp_path}/store", "a", timeout=1.0)
    with pytest.raises(StoreAway, match=r"write of 'a' did not finish in 0\.2 s"):
        store.put("a", b"1")
    release()
    release()  # unlocks nothing that another holds by now
    store.put("a", b"1")
    assert store.read("a") == b"1"


def test_names_that_are_no_keys_are_not_listed(tmp_path):
    """What another program put there: reading any of them by `read` would be refused."""
    store = Store.open(f"{tmp_path}/store")
    store.put("acks/host.json", b"{}")
    for name in (".DS_Store", "read me.txt", "._host.json", "h\xf6st.json"):
        (tmp_path / "store" / "acks" / name).write_text("not ours")
    (tmp_path / "store" / "acks" / os.fsdecode(b"\xff\xfe.json")).write_text("not ours")
    assert store.list("acks/") == store.list() == ["acks/host.json"]
