"""The gradient noise scale: the batch size at which noise and signal of a step's gradient are equal.

McCandlish et al., arXiv 1812.06162, appendix A.1. With G the true gradient and S the trace of one token's
covariance, the mean gradient of B tokens has E|g|^2 = |G|^2 + S / B. Two batch sizes give both unknowns: the
microbatches of a step are the small batches, the whole step the big one, so no extra gradient is taken.
S / |G|^2, in tokens, is the simple noise scale: below it a larger batch saves steps, far above it wastes
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoiseSums:
    """Sums over a step's microbatches, float32 scalars.

    square_norms: of squared norms of summed (not mean) gradients. square_weights: of squared token weights.
    """

    square_norms: jax.Array
    square_weights: jax.Array


@dataclass(frozen=True)
class NoiseEstimate:
    """Unbiased estimates from one step, each negative at times: average many before dividing.

    signal: |G|^2. trace: S, in squared gradient times tokens.
    """

    signal: float
    trace: float


def empty() -> NoiseSums:
    return NoiseSums(square_norms=jnp.zeros((), jnp.float32), square_weights=jnp.zeros((), jnp.float32))


def add(sums: NoiseSums, gradients: dict[str, jax.Array], weight: jax.Array) -> NoiseSums:
    """Adds a microbatch: its gradient summed over tokens, and its token weight."""
    return NoiseSums(
        square_norms=sums.square_norms + optax.tree.norm(gradients, squared=True),
        square_weights=sums.square_weights + weight * weight,
    )


def estimate(
    *, square_norms: float, square_weights: float, weight: float, gradient_norm: float
) -> NoiseEstimate | None:
    """Solves the two equations of the module's docstring for one step.

    A microbatch of weight w has E|w g|^2 = w^2 |G|^2 + w S; summed and divided by the sum of w^2, it is a
    batch of size (sum of w^2) / W, whatever the microbatches weigh.

    weight: W, tokens of the step. gradient_norm: of its mean gradient, before clipping.
    Returns None where one microbatch has all the weight, which leaves one equation.
    """
    if square_weights <= 0 or weight <= 0:
        return None
    small = square_weights / weight
    if small >= weight * (1 - 1e-6):
        return None
    small_square, big_square = square_norms / square_weights, gradient_norm**2
    return NoiseEstimate(
        signal=(weight * big_square - small * small_square) / (weight - small),
        trace=(small_square - big_square) / (1 / small - 1 / weight),
    )


def smoothed(estimates: Sequence[NoiseEstimate], *, decay: float = 0.9) -> list[float | None]:
    """Noise scale in tokens after each estimate: averages of both parts, then their ratio (appendix A.1).

    Exponential averages without the bias of their start. None while the averaged signal is not positive.
    """
    signal = trace = 0.0
    scales: list[float | None] = []
    for found in estimates:
        signal = decay * signal + (1 - decay) * found.signal
        trace = decay * trace + (1 - decay) * found.trace
        scales.append(max(trace, 0.0) / signal if signal > 0 else None)
    return scales
