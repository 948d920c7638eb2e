"""SwiGLU feed-forward (Shazeer 2020, arXiv 2002.05202), used for dense layers and shared experts."""

from __future__ import annotations

import jax
from flax import nnx

from jaxtrain.models.parameters import Linear


class SwiGLU(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, layers: int, size: int, hidden: int, *, stddev: float) -> None:
        self.gate_proj = Linear(rngs, layers, size, hidden, ("embed", "mlp"), stddev=stddev)
        self.up_proj = Linear(rngs, layers, size, hidden, ("embed", "mlp"), stddev=stddev)
        self.down_proj = Linear(rngs, layers, hidden, size, ("mlp", "embed"), stddev=stddev)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
