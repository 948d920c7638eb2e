"""Group Sequence Policy Optimization (arXiv 2507.18071): one importance ratio for a whole answer."""

# N tokens of a microbatch

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch, Column
from jaxtrain.losses.base import Arrays, LossSums, Params
from jaxtrain.losses.policies.base import POLICY_COLUMNS, PolicyTokens, policy_sums
from jaxtrain.models.definition import Definition


@dataclass(frozen=True, kw_only=True)
class Gspo:
    """-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), with s = exp(mean(log pi - log pi_behavior)): eq. 5-7.

    The mean is over the trained tokens of a document. A token has the ratio of its document and a gradient of
    its own, as in GSPO-token (eq. 13-14), so that advantages may differ inside a document; where they do not,
    both are the same.

    eps_low, eps_high: the paper's.
    """

    eps_low: float = 3e-4
    eps_high: float = 4e-4

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
        fixed_N = jax.lax.stop_gradient(tokens.logprobs_N)
        sequence_N = jnp.exp(tokens.document_mean(fixed_N - tokens.behavior_logprobs_N))
        ratio_N = sequence_N * jnp.exp(tokens.logprobs_N - fixed_N)
        clipped_N = jnp.clip(ratio_N, 1 - self.eps_low, 1 + self.eps_high)
        gain_N = jnp.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
        return -(gain_N * tokens.weights_N).sum(), {
            "sequence_ratio": (sequence_N * tokens.weights_N).sum(),
            "clipped_fraction": ((gain_N < ratio_N * tokens.advantages_N) * tokens.weights_N).sum(),
        }
