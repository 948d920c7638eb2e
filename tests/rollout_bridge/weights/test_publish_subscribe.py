"""What is published is what the host quantiser says, at every version, however the reader follows."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rollout_bridge.quantization.host import NonFiniteError
from rollout_bridge.weights.manifest import Kind
from rollout_bridge.weights.publisher import Compaction
from tests.rollout_bridge.weights import tiny


def test_every_version_of_a_chain_arrives_bit_for_bit(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store, full_every=4)
    assert trainer.take_over().version == 0
    reader = tiny.subscriber(store, tmp_path / "each")
    lagging = tiny.subscriber(store, tmp_path / "lagging")
    tree = tiny.params()
    kinds = []
    for number in range(1, 8):
        tree = tiny.step(tree, number)
        manifest = trainer.publish(tiny.on_device(tree), step=10 * number).result(60)
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
    one.take_over(), eight.take_over()
    reader = tiny.subscriber(stores[1], tmp_path / "mirror")
    tree = tiny.params()
    for number in range(1, 4):
        tree = tiny.step(tree, number)
        alone = one.publish(tiny.on_device(tree), step=number).result(60)
        spread = eight.publish(sharded(tree, (2, 4), ("a", "b"), axis_type), step=number).result(60)
        assert {name: entry.digest for name, entry in alone.tensors.items()} == {
            name: entry.digest for name, entry in spread.tensors.items()
        }
        assert spread.stats.changed_fraction == alone.stats.changed_fraction
        assert reader.advance() is not None
        tiny.assert_holds(reader, tree)
    experts = spread.tensors["model.layers.1.mlp.experts.3.gate_proj.weight"].blobs
    assert len(experts) == 4 and {piece.rectangle[1] for piece in experts} == {(0, 32)}
    one.close(), eight.close()


def test_changes_picked_out_on_the_device_are_those_found_on_the_host(tmp_path, monkeypatch):
    from rollout_bridge.weights import device_bits

    monkeypatch.setattr(device_bits, "_CHUNK_ELEMENTS", 3000)  # several chunks a stack
    monkeypatch.setattr(device_bits, "_SMALL_ELEMENTS", 1000)
    stores = [tiny.open_store(f"{tmp_path.name}-{kind}") for kind in Compaction]
    made = [
        tiny.publisher(store, compaction=kind) for store, kind in zip(stores, Compaction, strict=True)
    ]
    tree = tiny.params()
    for trainer in made:
        trainer.take_over()
    for number, size in enumerate((1e-5, 1e-5, 3e-4, 1e-2, 1e-5), 1):
        tree = tiny.step(tree, number, size=size, paths_changed=0.7)
        params = sharded(tree, (2, 4), ("a", "b"), AxisType.Auto)
        results = [trainer.publish(params, step=number).result(60) for trainer in made]
        first = results[0].model_dump(exclude={"run_id", "parent"})
        for other in results[1:]:
            assert other.model_dump(exclude={"run_id", "parent"}) == first
    for trainer in made:
        trainer.close()
