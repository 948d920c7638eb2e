"""describe(): bytes by hand; checks that name what is misplaced."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.errors import ShardingError, UnusedAxisWarning
from sharding.inspect import assert_sharded, assert_waste_below, describe, size
from sharding.mesh import MeshSpec
from sharding.tree import shard

AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)


@pytest.fixture(scope="module", params=AXIS_TYPES)
def mesh(request):
    return MeshSpec({"fsdp": 2, "tensor": 4}, axis_type=request.param).build()


@pytest.fixture(scope="module")
def abstract(mesh):
    """kernel: bfloat16 16 x 32 over both axes; norm: float32 24 over tensor; step: int32, replicated."""

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    return {
        "kernel": array((16, 32), jnp.bfloat16, "fsdp", "tensor"),
        "norm": array((24,), jnp.float32, "tensor"),
        "step": array((), jnp.int32),
    }


def test_bytes_by_hand(abstract):
    kernel, norm, step = describe(abstract).rows
    # 16*32*2 bytes over 8 devices: nothing is held twice.
    assert (kernel.bytes, kernel.bytes_per_device, kernel.waste_per_device) == (1024, 128, 0)
    assert kernel.shard_shape == (8, 8)
    # 24*4 bytes over 4 of 8 devices: 24 a device where 12 would do.
    assert (norm.bytes, norm.bytes_per_device, norm.waste_per_device) == (96, 24, 12)
    # 4 bytes on each of 8 devices; an even split rounds up to 1 byte.
    assert (step.bytes, step.bytes_per_device, step.waste_per_device) == (4, 4, 3)


def test_totals_and_table(abstract):
    description = describe(abstract)
    assert (description.bytes, description.bytes_per_device, description.waste_per_device) == (1124, 156, 15)
    text = str(description)
    assert "(fsdp, tensor)" in text
    assert "8x8" in text
    assert "156 B" in text
    assert "mesh: fsdp=2 tensor=4; 3 arrays, 1.098 KiB in all" in text


def test_bytes_agree_with_the_shards_of_real_arrays(mesh):
    placed = shard(np.ones((16, 8), np.float32), NamedSharding(mesh, P("fsdp")))
    (row,) = describe({"w": placed}, NamedSharding(mesh, P("fsdp", "tensor"))).rows
    assert row.bytes_per_device == 16 * 8 * 4 // 8
    with pytest.warns(UnusedAxisWarning):
        (row,) = describe({"w": placed}).rows
    assert row.bytes_per_device == placed.addressable_shards[0].data.nbytes == 256


def test_an_axis_that_shards_nothing_warns(mesh):
    tree = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("tensor")))}
    with pytest.warns(UnusedAxisWarning, match=r"'fsdp' of size 2 shards no array"):
        description = describe(tree)
    assert description.unused_axes == ("fsdp",)
    assert "'fsdp' of size 2 shards no array" in str(description)


def test_an_axis_of_size_one_does_not_warn():
    mesh = MeshSpec({"fsdp": 8, "tensor": 1}).build()
    tree = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert describe(tree).unused_axes == ()


def test_host_arrays_and_keys_are_described():
    rows = describe({"host": np.zeros((4, 2)), "key": jax.random.key(0)}).rows
    assert [(row.name, row.spec, row.bytes) for row in rows] == [
        ("host", "host", 64),
        ("key", "SingleDeviceSharding", 8),
    ]


def test_boxed_leaves_go_by_their_parameter_name(mesh):
    from flax import linen, nnx

    value = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", "tensor")))
    boxed = {"params": {"kernel": linen.LogicallyPartitioned(value, names=("embed", "mlp"))}}
    assert [row.name for row in describe(boxed).rows] == ["params/kernel"]
    state = nnx.State({"layer": nnx.State({"kernel": nnx.Param(value)})})
    assert [row.name for row in describe(state).rows] == ["layer/kernel"]


def test_assert_sharded_names_found_and_expected(mesh):
    rows, columns = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(None, "tensor"))
    tree = {"a": shard(np.ones((8, 8)), rows), "b": shard(np.ones((8, 8)), columns)}
    assert_sharded(tree, {"a": rows, "b": columns})
    with pytest.raises(
        ShardingError, match=r"^b: shape \(8, 8\) is sharded as \(-, tensor\), expected \(fsdp\)"
    ):
        assert_sharded(tree, rows)
    with pytest.raises(ShardingError, match="a: on no device"):
        assert_sharded({"a": np.ones(8)}, rows)


def test_assert_waste_below_names_the_replicated_leaf(mesh, abstract):
    assert_waste_below(abstract, 12)
    with pytest.raises(ShardingError, match=r"^norm: \(tensor\) of shape \(24,\) wastes 12 B"):
        assert_waste_below(abstract, 11)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB")]
)
def test_size(count, text):
    assert size(count) == text
