"""Routed experts as a few large matrix products over rows sorted by expert, where no grouped product is fast.

In the even layout every expert has a block of rows as long as its capacity, a quarter above the mean load,
and each matrix takes one batched product. When an expert has more rows than that, they are packed instead
and a loop over experts takes them by windows, so no row is ever dropped. Both layouts have the same shapes:
the choice is made on the device and compiles nothing.
"""

# N tokens, k experts a token, D model, E experts, F expert hidden, S slots, C capacity, W rows of a window

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

ROW_MULTIPLE = 64  # capacities are multiples of it, as matrix products like it
SLACK = 1.25  # capacity over mean load: what an evenly loaded router stays under
WINDOW = 256  # rows of one product of the packed layout: few copies of weights, little waste


@dataclass(frozen=True)
class Sizes:
    """Static sizes of a layout."""

    num_experts: int
    capacity: int
    window: int

    @property
    def slots(self) -> int:
        return self.num_experts * self.capacity

    @classmethod
    def of(cls, pairs: int, num_experts: int) -> Sizes:
        """For `pairs` (token, choice) pairs; leaves a window of room after the last packed row."""
        capacity = _round_up(int(SLACK * pairs / num_experts), ROW_MULTIPLE)
        window = min(WINDOW, _round_up(pairs, ROW_MULTIPLE))
        room = _round_up(-(-(pairs + window) // num_experts), ROW_MULTIPLE)
        return cls(num_experts=num_experts, capacity=max(capacity, room), window=window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layout:
    """Where rows are.

    slots_Nk: slot of each (token, choice), S for nobody's. sources_S: flat (token, choice) of each slot, N*k
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
    # Nobody's shift is so large that its slots are past the end.
    shifts = jnp.append(starts_E - packed_E, sizes.slots)
    slots = jnp.arange(flat.size, dtype=jnp.int32) + shifts[flat[order]]
    slots = jnp.minimum(slots, sizes.slots)
    sources_S = jnp.full((sizes.slots,), flat.size, jnp.int32).at[slots].set(order, mode="drop")
    slots_Nk = jnp.zeros_like(order).at[order].set(slots, unique_indices=True).reshape(ids_Nk.shape)
    return Layout(slots_Nk, sources_S, starts_E, counts_E, even)


@jax.custom_vjp
def block_experts(
    x_ND: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
    """See `routed_experts`. Weights of nobody (the id E) get no gradient."""
    return _forward(x_ND, ids_Nk, weights_Nk, gate_EDF, up_EDF, down_EFD)[0]


def _forward(
    x_ND: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> tuple[jax.Array, tuple[Any, ...]]:
    sizes = Sizes.of(ids_Nk.size, gate_EDF.shape[0])
    layout = layout_of(ids_Nk, sizes)
    scale_S = _take(weights_Nk.reshape(-1), layout.sources_S)

    def run(products: Products) -> tuple[jax.Array, ...]:
        rows_SD = _rows_of_tokens(x_ND, layout)
        gate_SF = products.product(rows_SD, gate_EDF)
        up_SF = products.product(rows_SD, up_EDF)
        hidden_SF = jax.nn.silu(gate_SF) * up_SF * scale_S[:, None]
        return _sum_of_choices(products.product(hidden_SF, down_EFD), layout), gate_SF, up_SF

    out_ND, gate_SF, up_SF = _in_layout(layout, sizes, run)
    return out_ND, (x_ND, weights_Nk, gate_EDF, up_EDF, down_EFD, layout, gate_SF, up_SF)


def _backward(residuals: tuple[Any, ...], grad_ND: jax.Array) -> tuple[Any, ...]:
    x_ND, weights_Nk, gate_EDF, up_EDF, down_EFD, layout, gate_SF, up_SF = residuals
    sizes = Sizes.of(weights_Nk.size, gate_EDF.shape[0])
    scale_S = _take(weights_Nk.reshape(-1), layout.sources_S)

    def run(products: Products) -> tuple[jax.Array, ...]:
        rows_SD = _rows_of_tokens(x_ND, layout)
        grad_SD = _rows_of_tokens(grad_ND, layout)
        grad_scaled_SF = products.transposed_product(grad_SD, down_EFD)
        sigmoid_SF = jax.nn.sigmoid(gate_SF)
        silu_SF = gate_SF * sigmoid_SF
        grad_hidden_SF = grad_scaled_SF * scale_S[:, None]
        grad_scale_S = (grad_scaled_SF * silu_SF * up_SF).sum(-1)
        grad_up_SF = grad_hidden_SF * silu_SF
        grad_gate_SF = grad_hidden_SF * up_SF * (sigmoid_SF + silu_SF * (1 - sigmoid_SF))
        grad_rows_SD = products.transposed_product(grad_gate_SF, gate_EDF)
        grad_rows_SD = grad_rows_SD + products.transposed_product(grad_up_SF, up_EDF)
        return (
            _sum_of_choices(grad_rows_SD, layout),
            _take(grad_scale_S, layout.slots_Nk),
            products.outer(rows_SD, grad_gate_SF),
            products.outer(rows_SD, grad_up_SF),
            products.outer(silu_SF * up_SF * scale_S[:, None], grad_SD),
        )

    grad_x, grad_weights, grad_gate, grad_up, grad_down = _in_layout(layout, sizes, run)
    no_grad = np.zeros(weights_Nk.shape, jax.dtypes.float0)
    return grad_x, no_grad, grad_weights, grad_gate, grad_up, grad_down


block_experts.defvjp(_forward, _backward)


def _in_layout(
    layout: Layout, sizes: Sizes, run: Callable[[Products], tuple[jax.Array, ...]]
) -> tuple[jax.Array, ...]:
    packed = Packed(sizes, layout.starts_E, layout.counts_E)
    return jax.lax.cond(layout.even, lambda: run(Even(sizes)), lambda: run(packed))


class Products(Protocol):
    """The three products of a matrix [A, B] of each expert with the rows of that expert."""

    def product(self, rows_SA: jax.Array, weights_EAB: jax.Array) -> jax.Array:
        """rows @ weights -> [S, B]."""
        ...

    def transposed_product(self, rows_SB: jax.Array, weights_EAB: jax.Array) -> jax.Array:
        """rows @ weights^T -> [S, A]."""
        ...

    def outer(self, rows_SA: jax.Array, grad_SB: jax.Array) -> jax.Array:
        """rows^T @ grad -> [E, A, B]."""
        ...


@dataclass(frozen=True)
class Even:
    """Products of rows that lie `capacity` to an expert: one batched product each."""

    sizes: Sizes

    def product(self, rows_SA: jax.Array, weights_EAB: jax.Array) -> jax.Array:
        return self._flat(jnp.einsum("ECA,EAB->ECB", self._by_expert(rows_SA), weights_EAB))

    def transposed_product(self, rows_SB: jax.Array, weights_EAB: jax.Array) -> jax.Array:
        return self._flat(jnp.einsum("ECB,EAB->ECA", self._by_expert(rows_SB), weights_EAB))

    def outer(self, rows_SA: jax.Array, grad_SB: jax.Array) -> jax.Array:
        return jnp.einsum("ECA,ECB->EAB", self._by_expert(rows_SA), self._by_expert(grad_SB))

    def _by_expert(self, rows_SA: jax.Array) -> jax.Array:
        return rows_SA.reshape(self.sizes.num_experts, self.sizes.capacity, -1)

    def _flat(self, rows_ECA: jax.Array) -> jax.Array:
        return rows_ECA.reshape(self.sizes.slots, -1)


@dataclass(frozen=True)
class Packed:
    """Products of rows without gaps. Experts go in order of their rows and the last window of each may reach
    into the next one's, which then writes its own over them.
    """

    sizes: Sizes
    starts_E: jax.Array
    counts_E: jax.Array

    def product(self, rows_SA: jax.Array, weights_EAB: jax.Array) -> jax.Array:
        return self._rows(rows_SA, weights_EAB, "WA,AB->WB", weights_EAB.shape[2])

    def transposed_product(self, rows_SB: jax.Array, weights_EAB: jax.Array) -> jax.Array:
        return self._rows(rows_SB, weights_EAB, "WB,AB->WA", weights_EAB.shape[1])

    def outer(self, rows_SA: jax.Array, grad_SB: jax.Array) -> jax.Array:
        def of_expert(_: None, expert: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            start, count = expert

            def add(window: jax.Array, total_AB: jax.Array) -> jax.Array:
                offset = window * self.sizes.window
                own = jnp.arange(self.sizes.window) < count - offset
                rows_WA = jnp.where(own[:, None], self._window(rows_SA, start + offset), 0)
                return total_AB + rows_WA.T @ self._window(grad_SB, start + offset)

            zeros = jnp.zeros((rows_SA.shape[1], grad_SB.shape[1]), rows_SA.dtype)
            return None, jax.lax.fori_loop(0, self._windows(count), add, zeros)

        return jax.lax.scan(of_expert, None, (self.starts_E, self.counts_E))[1]

    def _rows(self, rows_SA: jax.Array, weights_EAB: jax.Array, spec: str, width: int) -> jax.Array:
        def of_expert(
            out_SB: jax.Array, expert: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            weights_AB, start, count = expert

            def one(window: jax.Array, out_SB: jax.Array) -> jax.Array:
                offset = start + window * self.sizes.window
                value = jnp.einsum(spec, self._window(rows_SA, offset), weights_AB)
                return jax.lax.dynamic_update_slice_in_dim(out_SB, value, offset, axis=0)

            return jax.lax.fori_loop(0, self._windows(count), one, out_SB), None

        out_SB = jnp.zeros((self.sizes.slots, width), rows_SA.dtype)
        return jax.lax.scan(of_expert, out_SB, (weights_EAB, self.starts_E, self.counts_E))[0]

    def _windows(self, count: jax.Array) -> jax.Array:
        return -(-count // self.sizes.window)

    def _window(self, rows_SA: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(rows_SA, start, self.sizes.window, axis=0)


def _rows_of_tokens(x_ND: jax.Array, layout: Layout) -> jax.Array:
    """[S, D]: the token of each slot, zero where empty. Gathers only: a scatter-add is serial on CPU."""
    return _take(x_ND, layout.sources_S // layout.slots_Nk.shape[1])


def _sum_of_choices(rows_SD: jax.Array, layout: Layout) -> jax.Array:
    """[N, D]: the sum over a token's choices of their rows, zero for nobody's."""
    return _take(rows_SD, layout.slots_Nk).sum(axis=1)


def _take(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], zero where the index is past the end."""
    return jnp.take(values, index, axis=0, mode="fill", fill_value=0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
