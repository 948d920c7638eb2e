"""Muon alone: random gradients, and the directions it makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.optim.muon import MatrixLayout, MuonConfig, MuonState, layout_of, scale_by_muon

STEPS = 4


def gradients_of(
    shapes: Mapping[str, Sequence[int]], steps: int = STEPS, seed: int = 0
) -> list[dict[str, jax.Array]]:
    """Float32 gradients of each step, of standard deviation 0.01."""
    rng = np.random.default_rng(seed)
    return [
        {p: jnp.asarray(rng.normal(size=s) * 1e-2, jnp.float32) for p, s in shapes.items()}
        for _ in range(steps)
    ]


def directions_of(
    config: MuonConfig,
    gradients: Sequence[Mapping[str, jax.Array]],
    layouts: Mapping[str, MatrixLayout] | None = None,
) -> tuple[list[dict[str, jax.Array]], MuonState]:
    """The directions of each step, and the state after the last."""
    transform = scale_by_muon(config, layouts or {p: layout_of(g) for p, g in gradients[0].items()})
    state: Any = transform.init(gradients[0])
    update = jax.jit(transform.update)
    found = []
    for gradient in gradients:
        directions, state = update(gradient, state)
        found.append(directions)
    return found, state
