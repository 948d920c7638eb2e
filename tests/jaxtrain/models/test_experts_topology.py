"""Experts compiled ahead of time for TPUs that are not there: `pytest -m topology`, with libtpu installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain.models.config import ExpertImplementation
from jaxtrain.models.experts import routed_experts
from sharding.mesh import topology_devices

TOKENS, K, D, F = 1024, 8, 5120, 1536  # GLM-4.5's


@pytest.mark.topology
@pytest.mark.parametrize("experts", [5, 20])
def test_grouped_products_on_a_v5p_do_each_row_once(experts: int):
    """By XLA's own count, forward and all gradients: arithmetic does not grow with the experts held."""
    where = SingleDeviceSharding(topology_devices("v5p:2x2x1")[0])

    def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    def run(x_ND, ids_Nk, weights_Nk, *kernels):
        def experts_of(x_ND, weights_Nk, *kernels):
            return routed_experts(
                x_ND, ids_Nk, weights_Nk, kernels, implementation=ExpertImplementation.RAGGED, platform="tpu"
            )

        out, pull = jax.vjp(experts_of, x_ND, weights_Nk, *kernels)
        return out, pull(x_ND)

    compiled = (
        jax.jit(run)
        .lower(
            shape(TOKENS, D),
            shape(TOKENS, K, dtype=jnp.int32),
            shape(TOKENS, K),
            shape(experts, D, F),
            shape(experts, D, F),
            shape(experts, F, D),
        )
        .compile()
    )
    products = 3 * 3 * 2 * TOKENS * K * D * F  # three matrices, forward and two gradients each
    assert (compiled.cost_analysis() or {})["flops"] == pytest.approx(products, rel=0.05)
