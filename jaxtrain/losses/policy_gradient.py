"""Policy-gradient objectives on sampled tokens. Each returns unnormalised sums (contract 5)."""

# N tokens

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyLoss:
    """Sums over tokens with weight.

    loss: the surrogate. inside: weight of tokens inside the window. ratio, log_ratio_squared: of r and
    log(r)^2.
    """

    loss: jax.Array
    inside: jax.Array
    ratio: jax.Array
    log_ratio_squared: jax.Array


def double_sided_importance_sampling(
    logprobs_N: jax.Array,
    behavior_logprobs_N: jax.Array,
    advantages_N: jax.Array,
    weights_N: jax.Array,
    *,
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    """-sum stop_gradient(f(r)) * A * log pi, r = exp(log pi - log pi_behavior).

    f(r) = r for r in (1 - eps_low, 1 + eps_high), else 0: a token outside leaves the gradient, it is not
    clipped. Token level, because one trajectory mixes policy versions, and no pass of an old policy is
    needed.
    Source: Solar Open 2 (arXiv 2607.20062), direct double-sided importance sampling.
    """
    log_ratio = jax.lax.stop_gradient(logprobs_N) - behavior_logprobs_N
    ratio = jnp.exp(log_ratio)
    inside = (ratio > 1.0 - eps_low) & (ratio < 1.0 + eps_high)
    weights = weights_N * inside
    return PolicyLoss(
        loss=-(jnp.where(inside, ratio, 0.0) * advantages_N * logprobs_N * weights).sum(),
        inside=weights.sum(),
        ratio=(ratio * weights_N).sum(),
        log_ratio_squared=(jnp.square(log_ratio) * weights_N).sum(),
    )
