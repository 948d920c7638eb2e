"""Placement: values survive every move, boxes survive every map, and blocks hold what their sharding says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.errors import ShardingError
from sharding.mesh import MeshSpec
from sharding.tree import gather, replicate, reshard, shard, shardings_like, to_global, to_local

AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)


@pytest.fixture(scope="module", params=AXIS_TYPES)
def mesh(request):
    return MeshSpec({"fsdp": 2, "tensor": 4}, axis_type=request.param).build()


@pytest.fixture(scope="module")
def host():
    return {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "b": np.arange(8, dtype=np.int32)}


def test_shard_puts_each_block_where_its_spec_says(mesh, host):
    placed = shard(
        host, {"w": NamedSharding(mesh, P("fsdp", "tensor")), "b": NamedSharding(mesh, P("tensor"))}
    )
    by_device = {piece.device: np.asarray(piece.data) for piece in placed["w"].addressable_shards}
    np.testing.assert_array_equal(by_device[mesh.devices[1, 2]], host["w"][4:8, 4:6])
    by_device = {piece.device: np.asarray(piece.data) for piece in placed["b"].addressable_shards}
    np.testing.assert_array_equal(by_device[mesh.devices[0, 3]], host["b"][6:8])


def test_every_move_keeps_the_values(mesh, host):
    rows, columns = NamedSharding(mesh, P(("fsdp", "tensor"))), NamedSharding(mesh, P(None, "tensor"))
    by_rows = shard(host["w"], rows)
    moved = reshard(by_rows, columns)
    assert moved.sharding.is_equivalent_to(columns, 2)
    whole = replicate(moved, mesh)
    assert whole.sharding.is_fully_replicated
    for array in (by_rows, moved, whole):
        np.testing.assert_array_equal(gather(array), host["w"])


def test_global_and_local_are_inverse(mesh, host):
    shardings = {"w": NamedSharding(mesh, P("tensor")), "b": NamedSharding(mesh, P())}
    again = to_local(to_global(host, shardings))
    np.testing.assert_array_equal(again["w"], host["w"])
    np.testing.assert_array_equal(again["b"], host["b"])


def test_shardings_of_another_tree_are_refused_by_name(mesh, host):
    with pytest.raises(ShardingError, match=r"on one side only: \['b'\]"):
        shard(host, {"w": NamedSharding(mesh, P())})


def test_optimizer_moments_lie_as_their_parameters(mesh):
    parameters = {"dense": {"w": jnp.zeros((8, 8)), "b": jnp.zeros((8,))}}
    shardings = {
        "dense": {"w": NamedSharding(mesh, P("fsdp", "tensor")), "b": NamedSharding(mesh, P("tensor"))}
    }
    state = jax.eval_shape(optax.adam(1e-3).init, parameters)
    found = shardings_like(state, parameters, shardings, mesh)
    assert found[0].mu == shardings
    assert found[0].nu == shardings
    assert found[0].count == NamedSharding(mesh, P())


def test_a_moment_of_another_shape_is_replicated(mesh):
    """A factored second moment has its parameter's name but not its shape."""
    parameters = {"w": jnp.zeros((8, 8))}
    shardings = {"w": NamedSharding(mesh, P("fsdp", "tensor"))}
    found = shardings_like({"row": {"w": jnp.zeros((8,))}}, parameters, shardings, mesh)
    assert found == {"row": {"w": NamedSharding(mesh, P())}}


def test_boxed_trees_keep_their_boxes(mesh):
    from flax import linen, nnx

    sharding = NamedSharding(mesh, P("fsdp"))
    linen_tree = {"kernel": linen.LogicallyPartitioned(jnp.ones((4, 2)), names=("embed", None))}
    placed = shard(linen_tree, sharding)
    assert placed["kernel"].names == ("embed", None)
    assert placed["kernel"].value.sharding == sharding
    state = nnx.State({"kernel": nnx.Param(jnp.ones((4, 2)))})
    placed = shard(state, sharding)
    assert isinstance(placed["kernel"], nnx.Param)
    assert jax.tree.leaves(placed)[0].sharding == sharding
