"""Loss functions of the recipes: a definition, parameters and a microbatch to unnormalised sums."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.losses.policy_gradient import double_sided_importance_sampling
from jaxtrain.losses.token_logprobs import TokenLogprobs, token_logprobs
from jaxtrain.models.balance import RouterStatistics
from jaxtrain.models.definition import Definition
from jaxtrain.training.step import LossFunction, LossSums

NEXT_TOKEN_METRICS = ("entropy",)
POLICY_METRICS = ("entropy", "inside_fraction", "ratio", "log_ratio_squared")


def next_token(definition: Definition, params: Mapping[str, jax.Array], batch: Batch) -> LossSums:
    """Negative log-likelihood of the targets, summed with `loss_weights`."""
    out, router = _forward(definition, params, batch, temperature=None)
    weights = jnp.asarray(batch.loss_weights).reshape(-1)
    return LossSums(
        loss=-(out.logprobs * weights).sum(),
        weight=weights.sum(),
        metrics={"entropy": (out.entropy * weights).sum()},
        router=router,
    )


def policy(*, eps_low: float, eps_high: float) -> LossFunction:
    """The policy gradient with double-sided token masking. The loss is a mean over all trainable tokens,
    masked ones included, so that masking does not raise the weight of the tokens left.
    """

    def loss(definition: Definition, params: Mapping[str, jax.Array], batch: Batch) -> LossSums:
        out, router = _forward(
            definition, params, batch, temperature=jnp.asarray(batch.temperature).reshape(-1)
        )
        weights = jnp.asarray(batch.loss_weights).reshape(-1)
        sums = double_sided_importance_sampling(
            out.logprobs,
            jnp.asarray(batch.behavior_logprobs).reshape(-1),
            jnp.asarray(batch.advantages).reshape(-1),
            weights,
            eps_low=eps_low,
            eps_high=eps_high,
        )
        return LossSums(
            loss=sums.loss,
            weight=weights.sum(),
            metrics={
                "entropy": (out.entropy * weights).sum(),
                "inside_fraction": sums.inside,
                "ratio": sums.ratio,
                "log_ratio_squared": sums.log_ratio_squared,
            },
            router=router,
        )

    return loss


def _forward(
    definition: Definition, params: Mapping[str, jax.Array], batch: Batch, *, temperature: jax.Array | None
) -> tuple[TokenLogprobs, RouterStatistics]:
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    hidden, router = definition.bind(params)(tokens, positions, jnp.asarray(batch.segment_ids))
    out = token_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        definition.head(params),
        jnp.asarray(batch.targets).reshape(-1),
        temperature_N=temperature,
    )
    return out, router
