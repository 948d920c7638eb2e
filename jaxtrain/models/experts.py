"""Routed SwiGLU experts, dropless: every (token, chosen expert) pair is computed, whatever the imbalance.

Three implementations of one function, see `ExpertImplementation`; DENSE is the reference in tests.
"""

# N tokens, D model, E experts, F expert hidden, k experts a token, R rows of a block, M blocks

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models.config import ExpertImplementation, ModelConfig
from jaxtrain.models.parameters import normal, parameter
from jaxtrain.models.router import Routing

BLOCK_ROWS = 64  # rows that share one expert: large enough for a matrix product, small enough to waste little


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int) -> None:
        self.config = config
        e, d, f = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        std = config.initializer_range
        into, out = ("layers", "experts", "embed", "expert_mlp"), ("layers", "experts", "expert_mlp", "embed")
        self.gate_proj = parameter(rngs, (layers, e, d, f), into, normal(std))
        self.up_proj = parameter(rngs, (layers, e, d, f), into, normal(std))
        self.down_proj = parameter(rngs, (layers, e, f, d), out, normal(std))

    def __call__(self, x_ND: jax.Array, routing: Routing) -> jax.Array:
        """Weighted sum of each token's experts -> [N, D]."""
        weights = (w[...].astype(x_ND.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj))
        implementation = self.config.expert_implementation
        return routed_experts(x_ND, routing.ids, routing.weights, *weights, implementation=implementation)


def routed_experts(
    x_ND: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *,
    implementation: ExpertImplementation,
) -> jax.Array:
    """sum over k of weights * down(silu(gate(x)) * up(x)) of the experts `ids` -> [N, D] in the dtype of x.

    ids: integers in [0, E]. The id E is nobody: it contributes nothing, whatever its weight, so a device that
    holds some of the experts passes E for the others.
    """
    num_experts, k = gate_EDF.shape[0], ids_Nk.shape[1]
    chosen = resolve(implementation, tokens=x_ND.shape[0], num_experts=num_experts, num_experts_per_token=k)
    weights_Nk = jnp.where(ids_Nk < num_experts, weights_Nk, 0.0).astype(x_ND.dtype)
    function = {
        ExpertImplementation.DENSE: _dense,
        ExpertImplementation.BLOCKS: _blocks,
        ExpertImplementation.RAGGED: _ragged,
    }[chosen]
    return function(x_ND, ids_Nk, weights_Nk, gate_EDF, up_EDF, down_EFD)


def resolve(
    implementation: ExpertImplementation, *, tokens: int, num_experts: int, num_experts_per_token: int
) -> ExpertImplementation:
    """The implementation that AUTO means for this platform and number of tokens."""
    if implementation is not ExpertImplementation.AUTO:
        return implementation
    if jax.default_backend() != "cpu":
        return ExpertImplementation.RAGGED
    blocks = tokens * num_experts_per_token // BLOCK_ROWS + num_experts
    dense_rows = tokens * num_experts
    return ExpertImplementation.BLOCKS if 2 * blocks * BLOCK_ROWS < dense_rows else ExpertImplementation.DENSE


def _dense(
    x_ND: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
    chosen_NkE = jax.nn.one_hot(ids_Nk, gate_EDF.shape[0], dtype=x_ND.dtype)
    weights_NE = jnp.einsum("NkE,Nk->NE", chosen_NkE, weights_Nk)
    hidden = jax.nn.silu(jnp.einsum("ND,EDF->ENF", x_ND, gate_EDF)) * jnp.einsum("ND,EDF->ENF", x_ND, up_EDF)
    return jnp.einsum("ENF,EFD,NE->ND", hidden, down_EFD, weights_NE, optimize=[(0, 1), (0, 1)])


def _ragged(
    x_ND: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
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


def _blocks(
    x_ND: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
    n, d = x_ND.shape
    num_experts, k = gate_EDF.shape[0], ids_Nk.shape[1]
    num_blocks = -(-n * k // BLOCK_ROWS) + num_experts
    slot_Nk, expert_M = _block_layout(ids_Nk, num_experts=num_experts, num_blocks=num_blocks)
    rows = _dispatch(x_ND, slot_Nk, num_blocks * BLOCK_ROWS).reshape(num_blocks, BLOCK_ROWS, d)
    hidden = jax.nn.silu(_by_block(rows, gate_EDF, expert_M)) * _by_block(rows, up_EDF, expert_M)
    out_rows = _by_block(hidden, down_EFD, expert_M).reshape(-1, d)
    return jnp.einsum("NkD,Nk->ND", _collect(out_rows, slot_Nk), weights_Nk)


def _block_layout(ids_Nk: jax.Array, *, num_experts: int, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Slot of each (token, choice) in the padded rows [N, k], and the expert of each block [M].

    Experts follow one another, each padded up to whole blocks; `num_blocks` bounds any imbalance. The slots
    of nobody (id E) follow the last expert's and end inside the last blocks.
    """
    flat = ids_Nk.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts_E = jnp.bincount(flat, length=num_experts + 1)
    blocks_E = -(-counts_E // BLOCK_ROWS)
    block_ends_E = jnp.cumsum(blocks_E)
    row_starts_E = (block_ends_E - blocks_E) * BLOCK_ROWS
    sorted_ids = flat[order]
    rank = jnp.arange(flat.size) - (jnp.cumsum(counts_E) - counts_E)[sorted_ids]
    slot = jnp.zeros_like(flat).at[order].set((row_starts_E[sorted_ids] + rank).astype(flat.dtype))
    expert_M = jnp.searchsorted(block_ends_E, jnp.arange(num_blocks), side="right")
    return slot.reshape(ids_Nk.shape), jnp.minimum(expert_M, num_experts - 1)


@jax.custom_vjp
def _by_block(rows_MRD: jax.Array, weights_EDF: jax.Array, expert_M: jax.Array) -> jax.Array:
    """rows[m] @ weights[expert[m]] -> [M, R, F].

    The copies of the weights are not kept for the backward pass.
    """
    return rows_MRD @ weights_EDF[expert_M]


def _by_block_forward(
    rows_MRD: jax.Array, weights_EDF: jax.Array, expert_M: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return rows_MRD @ weights_EDF[expert_M], (rows_MRD, weights_EDF, expert_M)


def _by_block_backward(
    residual: tuple[jax.Array, jax.Array, jax.Array], grad_MRF: jax.Array
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    rows_MRD, weights_EDF, expert_M = residual
    grad_rows = jnp.einsum("MRF,MDF->MRD", grad_MRF, weights_EDF[expert_M])
    by_block_MDF = jnp.einsum("MRD,MRF->MDF", rows_MRD, grad_MRF)
    grad_weights = jnp.zeros_like(weights_EDF).at[expert_M].add(by_block_MDF)
    return grad_rows, grad_weights, np.zeros(expert_M.shape, jax.dtypes.float0)


_by_block.defvjp(_by_block_forward, _by_block_backward)


# Rows and tokens are related by a known injection, so both directions and both gradients are gathers:
# a scatter-add, which autodiff would produce, is serial on CPU and atomic on GPU.


def _source_of_slot(slot_Nk: jax.Array, num_slots: int) -> jax.Array:
    """Flat (token, choice) index held by each slot, N*k where the slot is padding."""
    size = slot_Nk.size
    empty = jnp.full((num_slots,), size, slot_Nk.dtype)
    return empty.at[slot_Nk.reshape(-1)].set(jnp.arange(size, dtype=slot_Nk.dtype), unique_indices=True)


@jax.custom_vjp
def _collect(rows_RD: jax.Array, slot_Nk: jax.Array) -> jax.Array:
    """[N, k, D]: the row of each (token, choice)."""
    return rows_RD[slot_Nk]


def _collect_forward(rows_RD: jax.Array, slot_Nk: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return rows_RD[slot_Nk], (slot_Nk, rows_RD.shape[0])


def _collect_backward(residual: tuple[jax.Array, int], grad_NkD: jax.Array) -> tuple[jax.Array, np.ndarray]:
    slot_Nk, num_rows = residual
    source = _source_of_slot(slot_Nk, num_rows)
    flat = grad_NkD.reshape(-1, grad_NkD.shape[-1])
    return _gather_or_zero(flat, source), np.zeros(slot_Nk.shape, jax.dtypes.float0)


_collect.defvjp(_collect_forward, _collect_backward)


def _gather_or_zero(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], zero where the index is one past the end."""
    return jnp.take(values, index, axis=0, mode="fill", fill_value=0)


def _dispatch(x_ND: jax.Array, slot_Nk: jax.Array, num_slots: int) -> jax.Array:
    """[num_slots, D]: the token of each slot, zero in padding."""
    k = slot_Nk.shape[1]

    @jax.custom_vjp
    def place(x: jax.Array, slot: jax.Array) -> jax.Array:
        return _gather_or_zero(x, _source_of_slot(slot, num_slots) // k)

    def forward(x: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        return place(x, slot), slot

    def backward(slot: jax.Array, grad: jax.Array) -> tuple[jax.Array, np.ndarray]:
        return grad[slot].sum(axis=1), np.zeros(slot.shape, jax.dtypes.float0)

    place.defvjp(forward, backward)
    return place(x_ND, slot_Nk)
