"""Looking tokens up on a mesh is indexing the whole table, and so is its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.models.embedding import embed
from jaxtrain.models.sharding_rules import row_sharding
from sharding.collectives import collectives
from sharding.mesh import MeshSpec

V, D = 64, 32


@pytest.mark.parametrize(
    "axes", [{"fsdp": 4, "expert": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 4}]
)
def test_a_mesh_gives_the_rows_and_their_gradient(axes):
    """Also of BF16 activations: the gradient of a token seen many times is summed in float32."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(V, D)).astype(np.float32)
    tokens = rng.integers(0, V, (8, 12)).astype(np.int32)
    tokens[0] = 0
    cotangent = rng.normal(size=(8, 12, D)).astype(jnp.bfloat16)
    mesh = MeshSpec(ici=axes).build()
    names = [a if a in axes else None for a in ("tensor", "fsdp")]
    split = NamedSharding(mesh, PartitionSpec(*names))

    def run(table, tokens):
        out, pull = jax.vjp(lambda table: embed(table, tokens, dtype="bfloat16", mesh=mesh), table)
        return out, pull(jnp.asarray(cotangent))[0]

    args = jax.device_put(table, split), jax.device_put(tokens, row_sharding(mesh))
    compiled = jax.jit(run, out_shardings=(row_sharding(mesh), split)).lower(*args).compile()
    out, gradient = compiled(*args)
    np.testing.assert_array_equal(out, table.astype(jnp.bfloat16)[tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, cotangent.astype(np.float32))
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    # No device is sent what all devices hold: neither the table nor the activations of the whole batch.
    gathers = [one for one in collectives(compiled, mesh) if one.kind == "all-gather"]
    assert all(one.bytes < table.nbytes for one in gathers), gathers
