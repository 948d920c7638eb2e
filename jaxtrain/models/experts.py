"""Routed SwiGLU experts, dropless: every (token, chosen expert) pair is computed, whatever the imbalance.

Three implementations of one function, see `ExpertImplementation`; DENSE is the reference in tests.
"""

# N tokens, D model, E experts, F expert hidden, k experts a token

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.config import ExpertImplementation, ModelConfig
from jaxtrain.models.expert_blocks import Sizes, block_experts
from jaxtrain.models.expert_windows import Kernels
from jaxtrain.models.parameters import normal, parameter
from jaxtrain.models.router import Routing


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int) -> None:
        self.config = config
        e, d, f = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        std = config.initializer_range
        into, out = (
            ("layers", "experts", "expert_embed", "expert_mlp"),
            ("layers", "experts", "expert_mlp", "expert_embed"),
        )
        self.gate_proj = parameter(rngs, (layers, e, d, f), into, normal(std))
        self.up_proj = parameter(rngs, (layers, e, d, f), into, normal(std))
        self.down_proj = parameter(rngs, (layers, e, f, d), out, normal(std))

    def __call__(self, x_ND: jax.Array, routing: Routing) -> jax.Array:
        """Weighted sum of each token's experts -> [N, D]."""
        implementation = self.config.expert_implementation
        return routed_experts(
            x_ND, routing.ids, routing.weights, self.kernels(x_ND.dtype), implementation=implementation
        )

    def kernels(self, dtype: jax.typing.DTypeLike) -> Kernels:
        return tuple(w[...].astype(dtype) for w in (self.gate_proj, self.up_proj, self.down_proj))


def routed_experts(
    x_ND: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    kernels: Kernels,
    *,
    implementation: ExpertImplementation,
    platform: str | None = None,
) -> jax.Array:
    """sum over k of weights * down(silu(gate(x)) * up(x)) of the experts `ids` -> [N, D] in the dtype of x.

    kernels: gate and up [E, D, F], down [E, F, D]. ids: integers in [0, E]. The id E marks an unused slot and
    contributes nothing, whatever its weight, so a device that holds some of the experts passes E for the
    others. platform: cpu, gpu or tpu, None for the default one; AUTO chooses by it.
    """
    num_experts, k = kernels[0].shape[0], ids_Nk.shape[1]
    chosen = resolve(
        implementation,
        platform=jax.default_backend() if platform is None else platform,
        tokens=x_ND.shape[0],
        num_experts=num_experts,
        num_experts_per_token=k,
    )
    weights_Nk = jnp.where(ids_Nk < num_experts, weights_Nk, 0.0).astype(x_ND.dtype)
    function = {
        ExpertImplementation.DENSE: _dense,
        ExpertImplementation.BLOCKS: block_experts,
        ExpertImplementation.RAGGED: _ragged,
    }[chosen]
    return function(x_ND, ids_Nk, weights_Nk, kernels)


def resolve(
    implementation: ExpertImplementation,
    *,
    platform: str,
    tokens: int,
    num_experts: int,
    num_experts_per_token: int,
) -> ExpertImplementation:
    """The implementation that AUTO means for a platform and number of tokens."""
    if implementation is not ExpertImplementation.AUTO:
        return implementation
    if platform == "tpu":
        return ExpertImplementation.RAGGED
    # Elsewhere XLA computes ragged_dot as a product with all experts.
    slots = Sizes.of(tokens * num_experts_per_token, num_experts).slots
    return ExpertImplementation.BLOCKS if slots < tokens * num_experts else ExpertImplementation.DENSE


def _dense(x_ND: jax.Array, ids_Nk: jax.Array, weights_Nk: jax.Array, kernels: Kernels) -> jax.Array:
    gate_EDF, up_EDF, down_EFD = kernels
    chosen_NkE = jax.nn.one_hot(ids_Nk, gate_EDF.shape[0], dtype=x_ND.dtype)
    weights_NE = jnp.einsum("NkE,Nk->NE", chosen_NkE, weights_Nk)
    hidden = jax.nn.silu(jnp.einsum("ND,EDF->ENF", x_ND, gate_EDF)) * jnp.einsum("ND,EDF->ENF", x_ND, up_EDF)
    return jnp.einsum("ENF,EFD,NE->ND", hidden, down_EFD, weights_NE, optimize=[(0, 1), (0, 1)])


def _ragged(x_ND: jax.Array, ids_Nk: jax.Array, weights_Nk: jax.Array, kernels: Kernels) -> jax.Array:
    gate_EDF, up_EDF, down_EFD = kernels
    num_experts, k = gate_EDF.shape[0], ids_Nk.shape[1]
    flat = ids_Nk.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes_E = jnp.bincount(flat, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    rows = x_ND[order // k]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate_EDF, sizes_E))
    hidden = hidden * jax.lax.ragged_dot(rows, up_EDF, sizes_E)
    out_rows = jax.lax.ragged_dot(hidden, down_EFD, sizes_E)
    out_NkD = out_rows[jnp.argsort(order)].reshape(-1, k, x_ND.shape[1])
    # Rows after the last group are undefined.
    out_NkD = jnp.where((ids_Nk < num_experts)[..., None], out_NkD, 0)
    return jnp.einsum("NkD,Nk->ND", out_NkD, weights_Nk)
