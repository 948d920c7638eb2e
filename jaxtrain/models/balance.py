"""What the routers of a batch did: load of each expert and the sequence-level balance loss."""

# B batch, S sequence, L layers, E experts, k experts a token

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.router import Routing, expert_counts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStatistics:
    """Sums over valid tokens, one row a MoE layer, and what else a batch's forward pass is asked for.

    counts: float32 [Lm, E], tokens that chose each expert.
    balance: float32 [Lm], sequence-level balance loss summed over sequences' tokens (see `sequence_balance`).
    max_logits: float32 [L, H], largest attention logit of each head in all layers but MTP's, dense ones
      first; None unless the model's `measure_max_logits` asks for it.
    """

    counts: jax.Array
    balance: jax.Array
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
    routing: Routing | None, segment_ids_BS: jax.Array, config: ModelConfig
) -> RouterStatistics | None:
    if routing is None:
        return None
    valid = segment_ids_BS.reshape(routing.ids.shape[:-1]) > 0
    return RouterStatistics(
        counts=expert_counts(routing.ids, valid, num_experts=config.n_routed_experts),
        balance=sequence_balance(routing, segment_ids_BS, config),
    )
