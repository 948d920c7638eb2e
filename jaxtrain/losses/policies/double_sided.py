"""Direct double-sided importance sampling (Solar Open 2, arXiv 2607.20062)."""

# N tokens

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch, Column
from jaxtrain.losses.base import Arrays, LossSums
from jaxtrain.losses.policies.base import POLICY_COLUMNS, PolicyTokens, policy_sums
from jaxtrain.models.definition import Definition, Params


@dataclass(frozen=True, kw_only=True)
class DoubleSided:
    """-sum stop_gradient(f(r)) * A * log pi, with r = exp(log pi - log pi_behavior).

    f(r) = r for r in (1 - eps_low, 1 + eps_high), else 0: a token outside has no gradient instead of a
    clipped one. Token level, because one trajectory mixes policy versions; no pass of an old policy is
    needed. Metrics are means over trainable tokens: entropy, inside_fraction, ratio, log_ratio_squared.

    eps_low, eps_high: 0.5 and 1 make the window (1/2, 2), symmetric in log-probability. Unpublished.
    """

    eps_low: float = 0.5
    eps_high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.eps_low <= 1:
            raise ValueError(f"eps_low: {self.eps_low} is not in (0, 1]")
        if not self.eps_high > 0:
            raise ValueError(f"eps_high: {self.eps_high} is not in (0, inf)")

    @property
    def columns(self) -> tuple[Column, ...]:
        return POLICY_COLUMNS

    def __call__(self, definition: Definition, params: Params, batch: Batch) -> LossSums:
        return policy_sums(definition, params, batch, self.objective)

    def objective(self, tokens: PolicyTokens) -> tuple[jax.Array, Arrays]:
        log_ratio_N = jax.lax.stop_gradient(tokens.logprobs_N) - tokens.behavior_logprobs_N
        ratio_N = jnp.exp(log_ratio_N)
        inside_N = (ratio_N > 1.0 - self.eps_low) & (ratio_N < 1.0 + self.eps_high)
        weights_N = tokens.weights_N * inside_N
        kept_N = jnp.where(inside_N, ratio_N, 0.0)
        loss = -(kept_N * tokens.advantages_N * tokens.logprobs_N * weights_N).sum()
        return loss, {
            "inside_fraction": weights_N.sum(),
            "ratio": (ratio_N * tokens.weights_N).sum(),
            "log_ratio_squared": (jnp.square(log_ratio_N) * tokens.weights_N).sum(),
        }
