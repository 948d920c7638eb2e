"""Experts with any numbers of rows: a loop over experts takes the rows of each by windows.

Windows have a few fixed sizes, so the last window of an expert holds few rows of the next one. Those rows are
computed too, and the expert they belong to overwrites them later: experts run in the order of their rows.
"""

# S slots, D model, E experts, F expert hidden, W rows of a window

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

SIZES = (512, 256, 128, 64)  # of windows; each a multiple of the next; at most the last one is wasted
Kernels = tuple[jax.Array, jax.Array, jax.Array]


def forward(
    rows_SD: jax.Array,
    scale_S: jax.Array,
    weights: Kernels,
    starts_E: jax.Array,
    counts_E: jax.Array,
) -> Kernels:
    """Output of each row's expert times scale [S, D], and what the gradient needs: gate and up [S, F].

    weights: gate, up [E, D, F] and down [E, F, D]. At least SIZES[-1] slots follow the last expert's rows.
    """

    def of_expert(out: Kernels, expert: tuple[Kernels, jax.Array, jax.Array]) -> tuple[Kernels, None]:
        (gate_DF, up_DF, down_FD), start, count = expert

        def of_window(size: int, offset: jax.Array, out: Kernels) -> Kernels:
            at = start + offset
            rows_WD = _slice(rows_SD, at, size)
            gate_WF, up_WF = rows_WD @ gate_DF, rows_WD @ up_DF
            hidden_WF = jax.nn.silu(gate_WF) * up_WF * _slice(scale_S, at, size)[:, None]
            found = (hidden_WF @ down_FD, gate_WF, up_WF)
            return jax.tree.map(lambda all_S, window_W: _write(all_S, window_W, at), out, found)

        return _over_windows(count, rows_SD.shape[0], of_window, out), None

    hidden_SF = jnp.zeros((rows_SD.shape[0], weights[0].shape[2]), rows_SD.dtype)
    empty = (jnp.zeros_like(rows_SD), hidden_SF, hidden_SF)
    return jax.lax.scan(of_expert, empty, (weights, starts_E, counts_E))[0]


def backward(
    rows_SD: jax.Array,
    grad_SD: jax.Array,
    gate_SF: jax.Array,
    up_SF: jax.Array,
    scale_S: jax.Array,
    weights: Kernels,
    starts_E: jax.Array,
    counts_E: jax.Array,
) -> tuple[jax.Array, jax.Array, Kernels]:
    """Gradients of rows [S, D], of scale [S] and of the three weights, given that of the output [S, D]."""

    def of_expert(
        by_row: tuple[jax.Array, jax.Array], expert: tuple[Kernels, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], Kernels]:
        (gate_DF, up_DF, down_FD), start, count = expert

        def of_window(size: int, offset: jax.Array, sums: tuple[Any, Kernels]) -> tuple[Any, Kernels]:
            by_row, (grad_gate_DF, grad_up_DF, grad_down_FD) = sums
            at = start + offset
            own = (jnp.arange(size) < count - offset)[:, None]
            rows_WD, dout_WD = _slice(rows_SD, at, size), _slice(grad_SD, at, size)
            hidden = hidden_gradients(
                jnp.einsum("WD,FD->WF", dout_WD, down_FD),
                _slice(gate_SF, at, size),
                _slice(up_SF, at, size),
                _slice(scale_S, at, size),
            )
            dgate_WF, dup_WF, scaled_WF = (jnp.where(own, x, 0) for x in hidden[:3])
            drows_WD = jnp.einsum("WF,DF->WD", dgate_WF, gate_DF) + jnp.einsum("WF,DF->WD", dup_WF, up_DF)
            found = (drows_WD, hidden[3])
            return jax.tree.map(lambda all_S, window_W: _write(all_S, window_W, at), by_row, found), (
                grad_gate_DF + rows_WD.T @ dgate_WF,
                grad_up_DF + rows_WD.T @ dup_WF,
                grad_down_FD + scaled_WF.T @ dout_WD,
            )

        zeros = jax.tree.map(jnp.zeros_like, (gate_DF, up_DF, down_FD))
        return _over_windows(count, rows_SD.shape[0], of_window, (by_row, zeros))

    empty = (jnp.zeros_like(rows_SD), jnp.zeros_like(scale_S))
    by_row, grads = jax.lax.scan(of_expert, empty, (weights, starts_E, counts_E))
    return *by_row, grads


def hidden_gradients(
    dscaled_WF: jax.Array, gate_WF: jax.Array, up_WF: jax.Array, scale_W: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of silu(gate) * up * scale, whose gradient is given: those of gate and up, the value, that of scale."""
    sigmoid_WF = jax.nn.sigmoid(gate_WF)
    silu_WF = gate_WF * sigmoid_WF
    dhidden_WF = dscaled_WF * scale_W[:, None]
    return (
        dhidden_WF * up_WF * (sigmoid_WF + silu_WF * (1 - sigmoid_WF)),
        dhidden_WF * silu_WF,
        silu_WF * up_WF * scale_W[:, None],
        (dscaled_WF * silu_WF * up_WF).sum(-1),
    )


def _over_windows(
    count: jax.Array, slots: int, of_window: Callable[[int, jax.Array, Any], Any], carry: Any
) -> Any:
    """Folds `of_window(size, offset, carry)` over windows that cover `count` rows, large ones first."""
    rows, covered = -(-count // SIZES[-1]) * SIZES[-1], jnp.int32(0)
    for size in (size for size in SIZES if size <= slots):
        windows = (rows - covered) // size

        def one(index: jax.Array, carry: Any, size: int = size, first: jax.Array = covered) -> Any:
            return of_window(size, first + index * size, carry)

        carry = jax.lax.fori_loop(0, windows, one, carry)
        covered = covered + windows * size
    return carry


def _slice(x_S: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_S, start, size, axis=0)


def _write(x_S: jax.Array, window_W: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_S, window_W, start, axis=0)
