"""Routed experts as a few large matrix products over rows sorted by expert, where no grouped product is fast.

In the even layout every expert has a block of rows as long as its capacity, a quarter above the mean load,
and each matrix takes one batched product. When an expert has more rows than that, the rows of all experts are
packed and computed by windows (`expert_windows`), so no row is ever dropped. Both layouts have the same
shapes: the device chooses between them without another compilation.
"""

# N tokens, k experts a token, D model, E experts, F expert hidden, S slots, C capacity

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models import expert_windows
from jaxtrain.models.expert_windows import Kernels

ROW_MULTIPLE = 64  # capacities are multiples of it, for fast matrix products
SLACK = 1.25  # capacity over mean load; an evenly loaded router stays below it


@dataclass(frozen=True)
class Sizes:
    """Static sizes of a layout."""

    num_experts: int
    capacity: int

    @property
    def slots(self) -> int:
        return self.num_experts * self.capacity

    @classmethod
    def of(cls, pairs: int, num_experts: int) -> Sizes:
        """For `pairs` (token, choice) pairs, with room for the smallest window after the last packed row."""
        capacity = _round_up(int(SLACK * pairs / num_experts), ROW_MULTIPLE)
        room = _round_up(-(-(pairs + expert_windows.SIZES[-1]) // num_experts), ROW_MULTIPLE)
        return cls(num_experts=num_experts, capacity=max(capacity, room))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layout:
    """The places of rows.

    slots_Nk: slot of each (token, choice), S for the id E. sources_S: flat (token, choice) of each slot, N*k
    where empty. starts_E, counts_E: rows of each expert. even: no expert has more rows than the capacity.
    """

    slots_Nk: jax.Array
    sources_S: jax.Array
    starts_E: jax.Array
    counts_E: jax.Array
    even: jax.Array


def layout_of(ids_Nk: jax.Array, sizes: Sizes) -> Layout:
    """Rows of each expert together, in token order."""
    flat = ids_Nk.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts_E = jnp.bincount(flat, length=sizes.num_experts + 1)[:-1].astype(jnp.int32)
    packed_E = jnp.cumsum(counts_E) - counts_E
    even = counts_E.max() <= sizes.capacity
    starts_E = jnp.where(even, jnp.arange(sizes.num_experts, dtype=jnp.int32) * sizes.capacity, packed_E)
    # The shift of the id E puts its slots past the end.
    shifts = jnp.append(starts_E - packed_E, sizes.slots)
    slots = jnp.arange(flat.size, dtype=jnp.int32) + shifts[flat[order]]
    slots = jnp.minimum(slots, sizes.slots)
    sources_S = jnp.full((sizes.slots,), flat.size, jnp.int32).at[slots].set(order, mode="drop")
    slots_Nk = jnp.zeros_like(order).at[order].set(slots, unique_indices=True).reshape(ids_Nk.shape)
    return Layout(slots_Nk, sources_S, starts_E, counts_E, even)


@jax.custom_vjp
def block_experts(x_ND: jax.Array, ids_Nk: jax.Array, weights_Nk: jax.Array, kernels: Kernels) -> jax.Array:
    """See `routed_experts`. Kernels of the id E get no gradient."""
    return _forward(x_ND, ids_Nk, weights_Nk, kernels)[0]


def _forward(
    x_ND: jax.Array, ids_Nk: jax.Array, weights_Nk: jax.Array, kernels: Kernels
) -> tuple[jax.Array, tuple[Any, ...]]:
    sizes = Sizes.of(ids_Nk.size, kernels[0].shape[0])
    layout = layout_of(ids_Nk, sizes)
    rows_SD, scale_S = _rows_of_tokens(x_ND, layout), take_or_zero(weights_Nk.reshape(-1), layout.sources_S)
    out_SD, gate_SF, up_SF = jax.lax.cond(
        layout.even,
        lambda: _even_forward(rows_SD, scale_S, kernels, sizes),
        lambda: expert_windows.forward(rows_SD, scale_S, kernels, layout.starts_E, layout.counts_E),
    )
    return _sum_of_choices(out_SD, layout), (x_ND, weights_Nk, kernels, layout, gate_SF, up_SF)


def _backward(residuals: tuple[Any, ...], grad_ND: jax.Array) -> tuple[Any, ...]:
    x_ND, weights_Nk, kernels, layout, gate_SF, up_SF = residuals
    sizes = Sizes.of(weights_Nk.size, kernels[0].shape[0])
    rows_SD, grad_SD = _rows_of_tokens(x_ND, layout), _rows_of_tokens(grad_ND, layout)
    of_rows = (rows_SD, grad_SD, gate_SF, up_SF, take_or_zero(weights_Nk.reshape(-1), layout.sources_S))
    grad_rows_SD, grad_scale_S, grad_kernels = jax.lax.cond(
        layout.even,
        lambda: _even_backward(*of_rows, kernels, sizes),
        lambda: expert_windows.backward(*of_rows, kernels, layout.starts_E, layout.counts_E),
    )
    no_grad = np.zeros(weights_Nk.shape, jax.dtypes.float0)
    grad_weights_Nk = take_or_zero(grad_scale_S, layout.slots_Nk)
    return _sum_of_choices(grad_rows_SD, layout), no_grad, grad_weights_Nk, grad_kernels


block_experts.defvjp(_forward, _backward)


def _even_forward(rows_SD: jax.Array, scale_S: jax.Array, kernels: Kernels, sizes: Sizes) -> Kernels:
    """As `expert_windows.forward`."""
    gate_EDF, up_EDF, down_EFD = kernels
    rows_ECD = _by_expert(rows_SD, sizes)
    gate_ECF = jnp.einsum("ECD,EDF->ECF", rows_ECD, gate_EDF)
    up_ECF = jnp.einsum("ECD,EDF->ECF", rows_ECD, up_EDF)
    hidden_ECF = jax.nn.silu(gate_ECF) * up_ECF * _by_expert(scale_S[:, None], sizes)
    out_ECD = jnp.einsum("ECF,EFD->ECD", hidden_ECF, down_EFD)
    return _flat(out_ECD), _flat(gate_ECF), _flat(up_ECF)


def _even_backward(
    rows_SD: jax.Array,
    grad_SD: jax.Array,
    gate_SF: jax.Array,
    up_SF: jax.Array,
    scale_S: jax.Array,
    kernels: Kernels,
    sizes: Sizes,
) -> tuple[jax.Array, jax.Array, Kernels]:
    """As `expert_windows.backward`."""
    gate_EDF, up_EDF, down_EFD = kernels
    rows_ECD, dout_ECD = _by_expert(rows_SD, sizes), _by_expert(grad_SD, sizes)
    dscaled_SF = _flat(jnp.einsum("ECD,EFD->ECF", dout_ECD, down_EFD))
    *hidden, dscale_S = expert_windows.hidden_gradients(dscaled_SF, gate_SF, up_SF, scale_S)
    dgate_ECF, dup_ECF, scaled_ECF = (_by_expert(x, sizes) for x in hidden)
    drows_ECD = jnp.einsum("ECF,EDF->ECD", dgate_ECF, gate_EDF) + jnp.einsum("ECF,EDF->ECD", dup_ECF, up_EDF)
    return (
        _flat(drows_ECD),
        dscale_S,
        (
            jnp.einsum("ECD,ECF->EDF", rows_ECD, dgate_ECF),
            jnp.einsum("ECD,ECF->EDF", rows_ECD, dup_ECF),
            jnp.einsum("ECF,ECD->EFD", scaled_ECF, dout_ECD),
        ),
    )


def _by_expert(rows_SA: jax.Array, sizes: Sizes) -> jax.Array:
    return rows_SA.reshape(sizes.num_experts, sizes.capacity, -1)


def _flat(rows_ECA: jax.Array) -> jax.Array:
    return rows_ECA.reshape(-1, rows_ECA.shape[-1])


def _rows_of_tokens(x_ND: jax.Array, layout: Layout) -> jax.Array:
    """[S, D]: the token of each slot, zero where empty. Gathers only: a scatter-add is serial on CPU."""
    return take_or_zero(x_ND, layout.sources_S // layout.slots_Nk.shape[1])


def _sum_of_choices(rows_SD: jax.Array, layout: Layout) -> jax.Array:
    """[N, D]: the sum over a token's choices of their rows, zero for the id E."""
    return take_or_zero(rows_SD, layout.slots_Nk).sum(axis=1)


def take_or_zero(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], zero where the index is past the end."""
    return jnp.take(values, index, axis=0, mode="fill", fill_value=0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
