"""A parameter in one line: shape, logical axes, initialiser.

Layers are stacked: every parameter of a layer has a leading `layers` axis, for `lax.scan` and for
one sharding rule.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


class Buffer(nnx.Variable):
    """State that is saved, published and served but has no gradient (the router's correction bias)."""


def normal(stddev: float) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
    return lambda key, shape: stddev * jax.random.normal(key, shape, jnp.float32)


def zeros(_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def ones(_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    *,
    kind: type[nnx.Variable] = nnx.Param,
) -> nnx.Variable:
    """A float32 master parameter of `shape` whose dimensions have the logical names `axes`."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and logical axes {axes} differ in length")
    return kind(init(rngs.params(), shape), logical_axes=axes)


class Linear(nnx.Module):
    """Stacked `y = x @ kernel + bias`; kernel [layers, in, out]."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        layers: int,
        size_in: int,
        size_out: int,
        axes: tuple[str | None, str],
        *,
        stddev: float,
        bias: bool = False,
    ) -> None:
        self.kernel = parameter(rngs, (layers, size_in, size_out), ("layers", *axes), normal(stddev))
        if bias:
            self.bias = parameter(rngs, (layers, size_out), ("layers", axes[1]), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y
