"""What is published is what the host quantiser says, at every version, however the reader follows."""

import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rollout_bridge.architectures.tensors import paths
from rollout_bridge.delta import conditional_entropy_bytes
from rollout_bridge.quantization.host import NonFiniteError
from rollout_bridge.quantization.plan import scale_name
from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format.manifest import Kind
from rollout_bridge.weights.write import encoder, extraction
from rollout_bridge.weights.write.publisher import Compaction, Overtaken
from tests.rollout_bridge.weights import tiny

CORRECTION = "moe/mlp/router/correction_bias"


def test_every_version_of_a_chain_arrives_bit_for_bit(tmp_path):
    store = tiny.open_store(f"{tmp_path}/store")  # on disk; the other tests are in memory
    trainer = tiny.publisher(store, full_every=4)
    assert trainer.take_over().version == 0
    reader = tiny.subscriber(store, tmp_path / "each")
    lagging = tiny.subscriber(store, tmp_path / "lagging")
    tree = tiny.params()
    kinds = []
    for number in range(1, 8):
        tree = tiny.step(tree, number)
        manifest = trainer.publish(tiny.on_device(tree), step=10 * number).result(300)
        assert (manifest.version, manifest.step) == (number, 10 * number)
        kinds.append(manifest.kind)
        update = reader.advance()
        assert update is not None and (update.version, update.step) == (number, 10 * number)
        tiny.assert_holds(reader, tree)
        assert reader.mirror.verify() == update.verified == len(manifest.tensors)
        assert reader.advance() is None
        if number in (3, 7):  # folds 2..3 into one update; then 5 full, 6..7 on top
            folded = lagging.advance()
            assert folded is not None and folded.version == number
            tiny.assert_holds(lagging, tree)
        elif number == 1:
            lagging.advance()
    assert kinds == [Kind.FULL] + 3 * [Kind.DELTA] + [Kind.FULL] + 2 * [Kind.DELTA]
    trainer.close()


def test_a_chain_from_before_tensors_shared_blobs_is_read_and_goes_on(tmp_path, monkeypatch):
    """Format 1 had a blob a tensor: 2 and 3 are written so, 4 as now, and read one by one or at once."""
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store)
    trainer.take_over()
    following, folding = (tiny.subscriber(store, tmp_path / name) for name in ("following", "folding"))
    tree, members = tiny.params(), []
    for number in range(1, 5):
        with monkeypatch.context() as patch:
            if number < 4:
                patch.setattr(encoder.delta, "together", lambda changes: [[n] for n in range(len(changes))])
            manifest = trainer.publish(tiny.on_device(tree), step=number).result(300)
        pieces = [piece for entry in manifest.tensors.values() for piece in entry.blobs]
        members.append(sum(piece.member is not None for piece in pieces))
        places = {(piece.key, piece.offset) for piece in pieces}
        assert len(places) == len(pieces) if number < 4 else len(places) < len(pieces) / 4
        following.advance()
        tiny.assert_holds(following, tree)
        if number == 1:
            folding.advance()
        kept, tree = tree, tiny.step(tree, number)
    assert members[:3] == [0, 0, 0] and members[3] > 0
    folding.advance()
    tiny.assert_holds(folding, kept)
    trainer.close()


def test_a_reader_takes_the_change_of_a_full_version_if_it_has_what_it_changes(tmp_path):
    """Full versions every 3; what each reader fetches is told by the objects it asks for."""

    class Watched(Store):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.read_keys = []

        def read(self, key):
            self.read_keys.append(key)
            return super().read(key)

        def blobs(self):
            read, self.read_keys = self.read_keys, []
            names = [key.removeprefix("weights/versions/").split("/") for key in read if ".blob" in key]
            return sorted({(int(name[0]), "change" in name[-1]) for name in names})

    tiny.open_store(tmp_path.name)
    store = Watched.open(f"memory://{tmp_path.name}")
    trainer = tiny.publisher(store, full_every=3)
    trainer.take_over()
    following, lagging = (tiny.subscriber(store, tmp_path / name) for name in ("following", "lagging"))
    tree, seen = tiny.params(), []
    for number in range(1, 6):
        tree = tiny.step(tree, number, size=2e-5, paths_changed=0.5)
        manifest = trainer.publish(tiny.on_device(tree), step=number).result(300)
        assert manifest.follows == (number == 4)
        update = following.advance()
        tiny.assert_holds(following, tree)
        seen.append(store.blobs())
        if number == 4:
            assert 0 < len(update.changed) < len(manifest.tensors)
            stats = manifest.stats
            blobs = {key: store.read(key) for key in store.list(manifest.ref.directory) if "blob" in key}
            assert stats.delta_bytes == sum(len(data) for key, data in blobs.items() if "change" in key)
            assert stats.full_bytes == sum(len(data) for key, data in blobs.items() if "change" not in key)
            assert stats.reference_bytes > 0 and stats.delta_bytes < 0.2 * stats.full_bytes
            store.blobs()
        if number == 2:
            lagging.advance()
            store.blobs()
    assert seen == [[(1, False)], [(2, False)], [(3, False)], [(4, True)], [(5, False)]]
    lagging.advance()  # from 2 to 5 by three changes, which are fewer bytes than version 4 whole
    tiny.assert_holds(lagging, tree)
    assert store.blobs() == [(3, False), (4, True), (5, False)]
    new = tiny.subscriber(store, tmp_path / "new")
    new.advance()
    assert store.blobs() == [(4, False), (5, False)]
    trainer.close()


def test_a_newer_publication_takes_the_place_of_one_that_waits(tmp_path):
    class Slow(Store):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.gate = threading.Event()

        def create(self, key, data):
            if key.endswith("manifest.json"):
                assert self.gate.wait(300)
            return super().create(key, data)

    tiny.open_store(tmp_path.name)
    store = Slow.open(f"memory://{tmp_path.name}")
    trainer = tiny.publisher(store)
    trainer.take_over()
    trees = [tiny.params(seed) for seed in range(4)]
    # None of these calls waits: the first is held up at its manifest.
    flight, second, third, fourth = (
        trainer.publish(tiny.on_device(tree), step=step, update_rms=1.0) for step, tree in enumerate(trees)
    )
    assert [flight.version, second.version, third.version, fourth.version] == [1, 2, 2, 2]
    store.gate.set()
    assert fourth.result(300).version == 2 and fourth.result().step == 3
    assert flight.result().stats.update_rms == 1.0 and fourth.result().stats.update_rms is None
    for overtaken, by in ((second, 2), (third, 3)):
        with pytest.raises(Overtaken, match=f"step {overtaken.step} was replaced by step {by}"):
            overtaken.result()
    assert trainer.counters["overtaken"] == 2 and trainer.counters["published"] == 2
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, trees[3])
    trainer.close()


def sharded(tree, mesh_shape, names, axis_type):
    """Every axis of the mesh somewhere: experts and widths split, some of it across 128-blocks."""
    mesh = jax.make_mesh(mesh_shape, names, axis_types=(axis_type,) * len(names))
    specs = {
        "moe/mlp/experts/gate_proj": PartitionSpec(None, "a", None, "b"),
        "moe/mlp/experts/up_proj": PartitionSpec(None, None, "b", "a"),
        "dense/mlp/gate_proj/kernel": PartitionSpec(None, None, ("a", "b")),
        "dense/mlp/up_proj/kernel": PartitionSpec(None, "a", "b"),
        "dense/mlp/down_proj/kernel": PartitionSpec(None, "b"),
        "embedding": PartitionSpec("b", "a"),
        "lm_head/kernel": PartitionSpec("b", "a"),
        "moe/attention/q_proj/kernel": PartitionSpec(None, "b", "a"),
        "moe/attention/q_proj/bias": PartitionSpec(None, "a"),
    }
    return {
        path: jax.device_put(array, NamedSharding(mesh, specs.get(path, PartitionSpec())))
        for path, array in tree.items()
    }


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_publish_the_same_bits_and_digests_as_one(axis_type, tmp_path):
    stores = [tiny.open_store(f"{tmp_path.name}-{count}") for count in (1, 8)]
    one, eight = (tiny.publisher(store) for store in stores)
    one.take_over()
    eight.take_over()
    reader = tiny.subscriber(stores[1], tmp_path / "mirror")
    tree = tiny.params()
    for number in range(1, 4):
        tree = tiny.step(tree, number)
        alone = one.publish(tiny.on_device(tree), step=number).result(300)
        spread = eight.publish(sharded(tree, (2, 4), ("a", "b"), axis_type), step=number).result(300)
        assert {name: entry.digest for name, entry in alone.tensors.items()} == {
            name: entry.digest for name, entry in spread.tensors.items()
        }
        assert spread.stats.changed_fraction == alone.stats.changed_fraction
        assert reader.advance() is not None
        tiny.assert_holds(reader, tree)
    experts = spread.tensors["model.layers.1.mlp.experts.3.gate_proj.weight"].blobs
    assert len(experts) == 4 and {piece.rectangle[1] for piece in experts} == {(0, 32)}
    one.close()
    eight.close()


def test_changes_picked_out_on_the_device_are_those_found_on_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(extraction, "_CHUNK_ELEMENTS", 3000)  # two chunks of the largest stack
    monkeypatch.setattr(extraction, "_SMALL_ELEMENTS", 1600)
    kinds = (Compaction.HOST, Compaction.DEVICE)
    stores = [tiny.open_store(f"{tmp_path.name}-{kind}") for kind in kinds]
    made = [tiny.publisher(store, compaction=kind) for store, kind in zip(stores, kinds, strict=True)]
    readers = [tiny.subscriber(store, tmp_path / store.url[-8:-1]) for store in stores]
    tree = tiny.params()
    for trainer in made:
        trainer.take_over()
    for number, size in enumerate((1e-5, 1e-5, 1e-2), 1):
        tree = tiny.step(tree, number, size=size, paths_changed=0.7)
        params = sharded(tree, (2, 4), ("a", "b"), AxisType.Auto)
        on_host, on_device = [trainer.publish(params, step=number).result(240) for trainer in made]
        assert on_device.stats.changed_fraction == on_host.stats.changed_fraction
        assert on_device.stats.reference_bytes == pytest.approx(on_host.stats.reference_bytes)
        for name, entry in on_host.tensors.items():
            twin = on_device.tensors[name]
            assert twin.digest == entry.digest
            assert [piece.rectangle for piece in twin.blobs] == [piece.rectangle for piece in entry.blobs]
        for reader in readers:
            reader.advance()
            tiny.assert_holds(reader, tree)
    for trainer in made:
        trainer.close()


def test_the_statistics_are_those_of_the_whole_arrays(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store)
    trainer.take_over()
    before, after = tiny.params(), tiny.step(tiny.params(), 1)
    trainer.publish(tiny.on_device(before), step=1)
    manifest = trainer.publish(tiny.on_device(after), step=2, update_rms=2e-4).result(300)
    trainer.close()
    run = trainer.run
    old, new = tiny.canonical(run, before), tiny.canonical(run, after)
    changed = sum(int((old[name] != new[name]).sum()) for name in old)
    assert manifest.stats.changed_fraction == changed / sum(bits.size for bits in old.values())
    assert manifest.stats.full_bytes_bf16 == 2 * sum(array.size for array in before.values())
    assert manifest.stats.update_rms == 2e-4
    directory = manifest.ref.directory
    blobs = [key for key in store.list(directory) if key.endswith(".blob")]
    assert manifest.stats.delta_bytes == sum(len(store.read(key) or b"") for key in blobs)
    reference = 0.0
    for group in paths(run.sources).values():
        for rename in (str, scale_name):
            names = [rename(source.name) for source in group if rename(source.name) in old]
            if names:
                stacks = (np.stack([tree[name] for name in names]) for tree in (old, new))
                reference += conditional_entropy_bytes(*stacks)
    assert manifest.stats.reference_bytes == pytest.approx(reference)


def test_parameters_may_be_donated_as_soon_as_publish_returns(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store)
    trainer.take_over()
    tree = tiny.params()
    params = tiny.on_device(tree)
    overwrite = jax.jit(lambda leaves: jax.tree.map(lambda leaf: leaf * 0 + 7, leaves), donate_argnums=0)
    publication = trainer.publish(params, step=1)
    overwrite(params)
    assert all(leaf.is_deleted() for leaf in params.values())
    publication.result(300)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, tree)
    trainer.close()


def test_weights_that_are_not_finite_are_refused_and_the_next_are_published(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store)
    trainer.take_over()
    tree = tiny.params()
    trainer.publish(tiny.on_device(tree), step=1).result(300)
    bad = {path: array.copy() for path, array in tree.items()}
    bad["moe/mlp/experts/up_proj"][0, 2, 5, 7] = np.nan
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight: 1 weights"):
        trainer.publish(tiny.on_device(bad), step=2).result(300)
    assert trainer.head.version == 1
    good = tiny.step(tree, 3)
    assert trainer.publish(tiny.on_device(good), step=3).result(300).version == 2
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, good)
    trainer.close()


def test_an_error_nobody_waited_for_is_raised_by_the_next_publish(tmp_path):
    trainer = tiny.publisher(tiny.open_store(tmp_path.name))
    trainer.take_over()
    tree = tiny.params()
    tree["final_norm"][0] = np.inf
    first = trainer.publish(tiny.on_device(tree), step=1)
    while not first.done():
        time.sleep(0.01)
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight"):
        trainer.publish(tiny.on_device(tiny.params()), step=2)
    assert trainer.publish(tiny.on_device(tiny.params()), step=3).result(300).version == 1
    trainer.close()


def test_parameters_that_do_not_fit_are_named(tmp_path):
    trainer = tiny.publisher(tiny.open_store(tmp_path.name))
    with pytest.raises(RuntimeError, match="take_over"):
        trainer.publish(tiny.on_device(tiny.params()), step=1)
    trainer.take_over()
    tree = tiny.on_device(tiny.params())
    missing = {path: array for path, array in tree.items() if path != "embedding"}
    with pytest.raises(ValueError, match=r"parameter embedding: found none, expected shape \(64, 32\)"):
        trainer.publish(missing, step=1)
    with pytest.raises(ValueError, match=r"parameter final_norm: found shape \(3,\), expected shape \(32,\)"):
        trainer.publish(tree | {"final_norm": jax.numpy.zeros(3)}, step=1)
    with pytest.raises(RuntimeError, match="nothing to compare with at version 0"):
        trainer.verify_head(tree)


def test_a_restart_on_another_mesh_goes_on_from_the_head(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store)
    trainer.take_over()
    trees = [tiny.params()]
    for number in range(1, 4):
        trees.append(tiny.step(trees[-1], number))
        trainer.publish(tiny.on_device(trees[number]), step=number).result(300)
    trainer.close()
    restarted = tiny.publisher(store)
    head = restarted.take_over()
    assert (head.version, head.step, head.incarnation) == (3, 3, 2)
    assert restarted.verify_head(sharded(trees[3], (2, 4), ("a", "b"), AxisType.Auto))
    assert not restarted.verify_head(tiny.on_device(trees[2]))
    bfloat16 = {path: array.astype(jax.numpy.bfloat16) for path, array in tiny.on_device(trees[3]).items()}
    assert restarted.verify_head(bfloat16 | {CORRECTION: jax.numpy.asarray(trees[3][CORRECTION])})
    tree = tiny.step(trees[3], 4)
    manifest = restarted.publish(sharded(tree, (2, 4), ("a", "b"), AxisType.Auto), step=4).result(300)
    assert manifest.kind is Kind.DELTA and manifest.stats.reference_bytes > 0
    assert (manifest.version, manifest.incarnation) == (4, 2)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, tree)
    restarted.close()


def test_two_processes_write_their_shards_and_one_commits(tmp_path):
    store = tiny.open_store(tmp_path.name)
    devices = jax.devices()
    pair = [
        tiny.publisher(
            store, process=process, processes=2, timeout=300.0, devices=devices[4 * process : 4 * process + 4]
        )
        for process in range(2)
    ]
    head = pair[0].take_over()
    pair[1].join(head)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    tree = tiny.params()
    for number in range(1, 4):
        tree = tiny.step(tree, number)
        params = sharded(tree, (2, 4), ("a", "b"), AxisType.Auto)
        publications = [process.publish(params, step=number) for process in pair]
        manifests = [publication.result(300) for publication in publications]
        assert manifests[0] == manifests[1]
        writers = {
            piece.key.split("-")[2] for entry in manifests[0].tensors.values() for piece in entry.blobs
        }
        assert writers == {"00000", "00001"}
        reader.advance()
        tiny.assert_holds(reader, tree)
    for process in pair:
        process.close()


def test_a_process_that_does_not_arrive_is_named(tmp_path):
    store = tiny.open_store(tmp_path.name)
    first = tiny.publisher(store, process=0, processes=2, timeout=0.2)
    first.take_over()
    with pytest.raises(StoreError, match=r"waited 0\.2 s for the part of attempt 1-1 by process\(es\) \[1\]"):
        first.publish(tiny.on_device(tiny.params()), step=1).result(300)
    with pytest.raises(RuntimeError, match="restart the trainer"):
        first.publish(tiny.on_device(tiny.params()), step=2)
    second = tiny.publisher(store, process=1, processes=2, timeout=0.2)
    second.join(first.head)
    with pytest.raises(StoreError, match=r"for the begin of attempt 5-1 by process\(es\) \[0\]"):
        second.publish(tiny.on_device(tiny.params()), step=5).result(300)


def test_the_chain_is_cut_when_its_deltas_outgrow_a_full_version(tmp_path):
    trainer = tiny.publisher(tiny.open_store(tmp_path.name), max_chain_fraction=0.5)
    trainer.take_over()
    tree = tiny.params()
    kinds, sizes = [], []
    for number in range(1, 9):
        tree = tiny.step(tree, number, size=1e-3)
        manifest = trainer.publish(tiny.on_device(tree), step=number).result(300)
        kinds.append(manifest.kind)
        sizes.append(manifest.stats.delta_bytes or manifest.stats.full_bytes)
    second = kinds.index(Kind.FULL, 1)
    assert sum(sizes[1:second]) > 0.5 * sizes[0] >= sum(sizes[1 : second - 1])
    trainer.close()
