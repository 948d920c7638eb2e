"""Muon compiled ahead of time for TPUs that are not there: `pytest -m topology`, with libtpu installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.muon_cost import work
from jaxtrain.optim import newton_schulz
from jaxtrain.optim.muon import MuonConfig, layout_of, scale_by_muon
from sharding.collectives import collectives
from sharding.mesh import MeshSpec

# GLM-4.5-Air's expert matrices, of one layer; key projections of 15 layers, which 8 devices do not divide.
LAYOUTS = {
    "experts": ((1, 16, 4096, 1408), PartitionSpec(None, "expert", "fsdp", None)),
    "layers that do not divide": ((15, 4096, 1024), PartitionSpec(None, ("expert", "fsdp"), None)),
}


@pytest.mark.topology
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_v5p_does_whole_matrices_dealt_out_evenly_with_two_all_to_alls(monkeypatch, name):
    """By XLA's own count, which takes a loop's body once: so without the loop that bounds working memory."""
    monkeypatch.setattr(newton_schulz, "_BATCH_ELEMENTS", 2**62)
    shape, spec = LAYOUTS[name]
    mesh = MeshSpec(ici={"expert": 2, "fsdp": 4}).topology("v5p:2x2x2")
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    config = MuonConfig(iteration_dtype="bfloat16")
    transform = scale_by_muon(config, {"w": layout_of(x)})
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=x.sharding),
        jax.eval_shape(transform.init, {"w": x}),
    )
    compiled = jax.jit(transform.update).lower({"w": x}, state).compile()
    (group,) = work(config, {"w": layout_of(x)})
    assert compiled.cost_analysis()["flops"] == pytest.approx(group.busiest, rel=0.05)
    assert compiled.cost_analysis()["flops"] <= 1.1 * group.optimum
    assert [one.kind for one in collectives(compiled)] == ["all-to-all", "all-to-all"]
    assert compiled.output_shardings[1].momentum["w"].is_equivalent_to(x.sharding, x.ndim)
