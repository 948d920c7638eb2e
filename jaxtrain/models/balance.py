"""Router statistics of a batch: the load of each expert and the sequence-level balance loss."""

# B batch, S sequence, L layers, E experts, k experts a token

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.router import Routing, correction_bias_update, expert_counts

# Buffers that balance the routers, in the order of the rows of expert counts.
CORRECTION_BIASES = ("moe/mlp/router/correction_bias", "mtp/layer/mlp/router/correction_bias")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStatistics:
    """Sums over valid tokens, one row a MoE layer, and optional outputs of the forward pass.

    counts: float32 [Lm, E], tokens that chose each expert.
    balance: float32 [Lm], sequence-level balance loss summed over sequences' tokens (see `sequence_balance`).
    experts: int32 [B, S, Lm, k], the experts of each token, best first; None unless asked for.
    max_logits: float32 [L, H], largest attention logit of each head in all layers but MTP's, dense ones
      first; None unless the model's `measure_max_logits` asks for it.
    """

    counts: jax.Array
    balance: jax.Array
    experts: jax.Array | None = None
    max_logits: jax.Array | None = None


def sequence_balance(routing: Routing, segment_ids_BS: jax.Array, config: ModelConfig) -> jax.Array:
    """Sequence-level balance loss of one layer, summed over rows' valid tokens (float32 scalar).

    For each row: E/k * sum_e f_e * P_e with f_e the fraction of the row's tokens choosing e (so its sum is
    k) and P_e the mean of the scores normalised over experts (DeepSeek-V3, arXiv 2412.19437, eq. 17-20); a
    row counts as many times as it has valid tokens. Denominator: the number of valid tokens of the batch.
    """
    b, s = segment_ids_BS.shape
    valid_BS = (segment_ids_BS > 0).astype(jnp.float32)
    tokens_B = jnp.maximum(valid_BS.sum(-1), 1.0)
    e, k = config.n_routed_experts, config.num_experts_per_tok
    chosen_BSE = jax.nn.one_hot(routing.ids, e, dtype=jnp.float32).sum(-2).reshape(b, s, e)
    share_BSE = (routing.scores / (routing.scores.sum(-1, keepdims=True) + 1e-20)).reshape(b, s, e)
    f_BE = jnp.einsum("BSE,BS->BE", chosen_BSE, valid_BS) * (e / k) / tokens_B[:, None]
    p_BE = jnp.einsum("BSE,BS->BE", share_BSE, valid_BS) / tokens_B[:, None]
    return (jax.lax.stop_gradient(f_BE) * p_BE).sum(-1) @ valid_BS.sum(-1)


def statistics(
    routing: Routing | None, segment_ids_BS: jax.Array, config: ModelConfig, *, with_experts: bool = False
) -> RouterStatistics | None:
    """Statistics of one layer, with `experts` [B, S, k]; None for a layer without a router."""
    if routing is None:
        return None
    valid = segment_ids_BS.reshape(routing.ids.shape[:-1]) > 0
    return RouterStatistics(
        counts=expert_counts(routing.ids, valid, num_experts=config.n_routed_experts),
        balance=sequence_balance(routing, segment_ids_BS, config),
        experts=routing.ids.reshape(*segment_ids_BS.shape, -1) if with_experts else None,
    )


def stacked(router: RouterStatistics) -> RouterStatistics:
    """Moves the leading axis of scanned layers to where `RouterStatistics` has it."""
    return router if router.experts is None else replace(router, experts=jnp.moveaxis(router.experts, 0, 2))


def joined(first: RouterStatistics, second: RouterStatistics) -> RouterStatistics:
    """Counts and balance of the layers of `first`, then of `second`; the rest is of `first` alone."""
    return replace(
        first,
        counts=jnp.concatenate([first.counts, second.counts]),
        balance=jnp.concatenate([first.balance, second.balance]),
    )


def balanced_buffers(
    buffers: Mapping[str, jax.Array], counts_LE: jax.Array, *, rate: jax.Array
) -> dict[str, jax.Array]:
    """The buffers after one step: correction biases move by the sign of the whole batch's load.

    counts_LE: summed over the batch, rows of the body's routers first, then those of the MTP layers.
    """
    moved, first = dict(buffers), 0
    for path in CORRECTION_BIASES:
        if path in buffers:
            rows = counts_LE[first : first + buffers[path].shape[0]]
            moved[path] = buffers[path] + correction_bias_update(rows, rate=rate)
            first += rows.shape[0]
    return moved


def load_violations(counts_LE: jax.Array) -> jax.Array:
    """Largest expert load over the mean load of each layer, minus 1; float32 [L]."""
    load_LE = counts_LE / jnp.maximum(counts_LE.mean(-1, keepdims=True), 1e-20)
    return jnp.max(load_LE, axis=-1, initial=1.0) - 1.0


def without_routers(segment_ids_BS: jax.Array, *, with_experts: bool) -> RouterStatistics:
    """Statistics of a decoder without MoE layers."""
    experts = jnp.zeros((*segment_ids_BS.shape, 0, 0), jnp.int32) if with_experts else None
    return RouterStatistics(jnp.zeros((0, 0)), jnp.zeros((0,)), experts)
