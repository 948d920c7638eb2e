"""What is said of a chain is what is in the store, and every damage is found by the replay."""

import pytest

from rollout_bridge.weights import run as runs
from rollout_bridge.weights.inspection import inspect_weights, kind_of
from rollout_bridge.weights.run import RunError
from tests.rollout_bridge.weights import tiny

TREES = [tiny.params()]
for _number in range(1, 6):
    TREES.append(tiny.step(TREES[-1], _number))


@pytest.fixture
def store(tmp_path):
    """Five versions; 1 and 4 are full. Agent "a" is at version 3."""
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store, full_every=3)
    trainer.take_over()
    for number in range(1, 6):
        trainer.publish(tiny.on_device(TREES[number]), step=10 * number).result(300)
    trainer.close()
    tiny.acknowledge(store, "a", 3, time=90.0, updates=3, pause_ms=(1.0, 3.0))
    return store


def test_versions_sizes_sparsity_and_readers(store):
    found = inspect_weights(store, verify=True, now=100.0)
    run = runs.load(store)
    assert run is not None
    assert found["health"] == {
        "ok": True,
        "problems": [],
        "oldest_version": 1,
        "full_versions": [1, 4],
        "quarantined": {},
        "beside_the_chain": [],
    }
    rows = found["versions"]
    assert [(row["version"], row["step"], row["kind"], row["follows"]) for row in rows] == [
        (1, 10, "full", False), (2, 20, "delta", True), (3, 30, "delta", True),
        (4, 40, "full", True), (5, 50, "delta", True),
    ]  # fmt: skip
    for row in rows:
        keys = [key for key in store.list(f"weights/versions/{row['version']:08d}/")]
        sizes = {key: len(store.read(key) or b"") for key in keys}
        assert row["full_bytes"] + row["delta_bytes"] == sum(n for k, n in sizes.items() if "blob" in k)
        assert row["manifest_bytes"] == sum(n for k, n in sizes.items() if k.endswith("manifest.json"))
    # Sparsity by kind, counted from the bits themselves.
    expected: dict[str, list[int]] = {}
    for before, after in zip(TREES[1:], TREES[2:], strict=False):
        old, new = tiny.canonical(run, before), tiny.canonical(run, after)
        for name in old:
            sums = expected.setdefault(kind_of(name), [0, 0])
            sums[0] += int((old[name] != new[name]).sum())
            sums[1] += old[name].size
    assert found["sparsity"]["by_kind"] == {kind: c / s for kind, (c, s) in expected.items()}
    assert set(expected) == {
        "scales", "router", "routed experts", "shared experts", "norms", "attention", "dense mlp",
        "embedding", "head",
    }  # fmt: skip
    assert set(found["sparsity"]["by_layer"]) == {"0", "1"}
    (agent,) = found["agents"]
    assert (agent["agent"], agent["version"], agent["behind"], agent["age_seconds"]) == ("a", 3, 2, 10.0)
    assert agent["pause_ms_median"] == 2.0
    # Two versions whole; versions 2 to 5 as changes.
    assert found["verified"] == {"versions": 5, "digests": 6 * len(run.tensors)}


@pytest.mark.parametrize(("version", "change"), [(3, False), (4, False), (4, True)])
def test_the_replay_names_a_damaged_version_and_writes_nothing(store, version, change):
    keys = store.list(f"weights/versions/{version:08d}/")
    key = next(key for key in keys if "blob" in key and ("change" in key) == change)
    data = store.read(key)
    store.put(key, data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    before = store.list()
    assert inspect_weights(store)["health"]["ok"]
    health = inspect_weights(store, verify=True)["health"]
    assert not health["ok"]
    assert all(f"version {version} " in problem and key in problem for problem in health["problems"])
    assert store.list() == before


def test_a_chain_without_a_way_in_is_broken(store):
    for version in (1, 2, 3):
        for key in store.list(f"weights/versions/{version:08d}/"):
            store.delete(key)
    assert inspect_weights(store, verify=True)["health"]["full_versions"] == [4]
    assert inspect_weights(store)["health"]["ok"]
    for key in store.list("weights/versions/00000004/"):
        if key.endswith("manifest.json"):
            store.delete(key)
    health = inspect_weights(store, verify=True)["health"]
    assert not health["ok"] and "no full version leads to the head" in health["problems"][-1]


def test_a_run_that_published_nothing_and_no_run(tmp_path):
    store = tiny.open_store(tmp_path.name)
    assert inspect_weights(store, verify=True)["head"] is None
    with pytest.raises(RunError, match=r"run\.json: missing"):
        inspect_weights(type(store).open(f"memory://{tmp_path.name}-none"))
