"""Loss functions of the recipes: a definition, parameters and a microbatch to unnormalised sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.losses.mtp import draft_loss
from jaxtrain.losses.policy_gradient import double_sided_importance_sampling
from jaxtrain.losses.target_logprobs import target_logprobs, target_nll
from jaxtrain.models.balance import RouterStatistics, joined
from jaxtrain.models.definition import Definition
from jaxtrain.training.step import MTP_METRIC, LossFunction, LossSums

NEXT_TOKEN_METRICS = ("entropy",)
POLICY_METRICS = ("entropy", "inside_fraction", "ratio", "log_ratio_squared")


def next_token(definition: Definition, params: Mapping[str, jax.Array], batch: Batch) -> LossSums:
    """Negative log-likelihood of the targets, summed with `loss_weights`."""
    hidden, router = _hidden(definition, params, batch)
    weights = jnp.asarray(batch.loss_weights)
    out = target_nll(definition, params, hidden, jnp.asarray(batch.targets), weights)
    sums = LossSums(loss=out.loss, weight=weights.sum(), metrics={"entropy": out.entropy}, router=router)
    return _with_drafts(sums, definition, params, hidden, batch)


def policy(*, eps_low: float, eps_high: float) -> LossFunction:
    """The policy gradient with double-sided token masking. The loss is a mean over all trainable tokens,
    masked ones included, so that masking does not raise the weight of the tokens left. MTP layers are trained
    beside it, on the policy's hidden states as given.
    """

    def loss(definition: Definition, params: Mapping[str, jax.Array], batch: Batch) -> LossSums:
        hidden, router = _hidden(definition, params, batch)
        out = target_logprobs(
            definition,
            params,
            hidden,
            jnp.asarray(batch.targets),
            temperature=jnp.asarray(batch.temperature),
            counted=jnp.asarray(batch.loss_weights) != 0,
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
        policy_sums = LossSums(
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
        # MTP layers learn to draft what the policy says: no gradient of their loss reaches the policy. Theirs
        # count in the global norm, though, so a step that is clipped moves the policy the less for them.
        fixed = {
            path: value if path.startswith("mtp/") else jax.lax.stop_gradient(value)
            for path, value in params.items()
        }
        return _with_drafts(policy_sums, definition, fixed, jax.lax.stop_gradient(hidden), batch)

    return loss


def _with_drafts(
    sums: LossSums,
    definition: Definition,
    params: Mapping[str, jax.Array],
    hidden_BSD: jax.Array,
    batch: Batch,
) -> LossSums:
    """The same sums with the loss of MTP layers, where the model has them."""
    if not definition.config.num_nextn_predict_layers:
        return sums
    draft = draft_loss(definition, params, hidden_BSD, batch)
    return replace(
        sums,
        mtp=draft.loss,
        router=joined(sums.router, draft.router),
        metrics={**sums.metrics, MTP_METRIC: draft.loss},
    )


def _hidden(
    definition: Definition, params: Mapping[str, jax.Array], batch: Batch
) -> tuple[jax.Array, RouterStatistics]:
    """Final hidden states [B, S, D], and router statistics."""
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    replay = None if batch.routed_experts is None else jnp.asarray(batch.routed_experts, jnp.int32)
    segments = jnp.asarray(batch.segment_ids)
    return definition.bind(params)(tokens, positions, segments, replay_BSLk=replay)
