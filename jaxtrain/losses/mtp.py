"""Loss of the multi-token prediction layers."""

# B batch, S sequence, D model, n MTP layers

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.losses.base import LossSums
from jaxtrain.losses.target_logprobs import target_nll
from jaxtrain.models.balance import RouterStatistics, joined
from jaxtrain.models.definition import Definition, Params


@dataclass(frozen=True)
class MtpTargets:
    """Inputs and targets of each depth, [n, B, S].

    tokens: at depth k (from 1) and position i, the document's token i + k. targets: token i + k + 1.
    weights: of those targets. segment_ids: 0 where the document has no such target.
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    segment_ids: jax.Array


def mtp_targets(batch: Batch, depths: int) -> MtpTargets:
    """Computed from a microbatch [B, S], whose `targets` are the next tokens."""
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.loss_weights)
    segments = jnp.asarray(batch.segment_ids)
    alike = [segments == _shift(segments, k) for k in range(1, depths + 1)]
    return MtpTargets(
        tokens=jnp.stack([_shift(targets, k - 1) for k in range(1, depths + 1)]),
        targets=jnp.stack([_shift(targets, k) for k in range(1, depths + 1)]),
        weights=jnp.stack([_shift(weights, k) * alike[k - 1] for k in range(1, depths + 1)]),
        segment_ids=jnp.stack([segments * same for same in alike]),
    )


@dataclass(frozen=True)
class DraftLoss:
    """loss: sum over tokens, the mean over depths. router: of the MTP layers."""

    loss: jax.Array
    router: RouterStatistics


def draft_loss(definition: Definition, params: Params, hidden_BSD: jax.Array, batch: Batch) -> DraftLoss:
    """Negative log-likelihood of later tokens, given the decoder's final hidden states.

    Its denominator is the batch's token weight, as for the main loss, although each depth predicts one token
    less of each document (DeepSeek-V3, arXiv 2412.19437, eq. 24-25).
    """
    ahead = mtp_targets(batch, definition.config.num_nextn_predict_layers)
    out_nBSD, router = definition.bind(params).predict_further(
        hidden_BSD,
        ahead.tokens,
        jnp.asarray(batch.positions),
        jnp.asarray(batch.segment_ids),
        counted_nBS=ahead.segment_ids,
    )
    found = target_nll(definition, params, out_nBSD, ahead.targets, ahead.weights)
    return DraftLoss(found.loss / ahead.tokens.shape[0], router)


def with_drafts(
    sums: LossSums, definition: Definition, params: Params, hidden_BSD: jax.Array, batch: Batch
) -> LossSums:
    """The same sums with the loss of MTP layers and its metric `mtp_loss`, where the model has them."""
    if not definition.config.num_nextn_predict_layers:
        return sums
    draft = draft_loss(definition, params, hidden_BSD, batch)
    return replace(
        sums,
        mtp=draft.loss,
        router=joined(sums.router, draft.router),
        metrics={**sums.metrics, "mtp_loss": draft.loss},
    )


def _shift(x_BS: jax.Array, by: int) -> jax.Array:
    """x[:, i + by], 0 past the end."""
    return jnp.pad(x_BS[:, by:], ((0, 0), (0, by)))
