"""Top-k router in float32: sigmoid or softmax scores, with or without a selection-only correction bias.

Sources: GLM-4.5 (arXiv 2508.06471) and auxiliary-loss-free balancing (arXiv 2408.15664): the bias takes part
in choosing experts, never in their weights, so it has no gradient. Softmax without a bias: Qwen3
(arXiv 2505.09388).
"""

# N tokens, D model, E experts, k experts a token

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.parameters import Buffer, normal, parameter, zeros
from jaxtrain.models.replay import choose
from rollout_bridge.architectures.decoder import Scoring


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """ids int32 [N, k], weights float32 [N, k], scores float32 [N, E].

    scores: of all experts, without the correction bias. The sum of a token's weights is
    routed_scaling_factor where the top-k is normalised.
    """

    ids: jax.Array
    weights: jax.Array
    scores: jax.Array


class Router(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int) -> None:
        self.config = config
        d, e, std = config.hidden_size, config.n_routed_experts, config.initializer_range
        self.kernel = parameter(rngs, (layers, d, e), ("layers", "embed", "router"), normal(std))
        if config.correction_bias:
            self.correction_bias = parameter(rngs, (layers, e), ("layers", "router"), zeros, kind=Buffer)

    def __call__(self, x_ND: jax.Array, replay_Nk: jax.Array | None = None) -> Routing:
        """replay_Nk: experts to keep where plausible, see `replay.choose`; None chooses freely."""
        config = self.config
        # By default TPUs round the factors of a float32 product to BF16, and GPUs to TF32.
        logits_NE = jnp.matmul(
            x_ND.astype(jnp.float32),
            self.kernel[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        match config.router_scoring:
            case Scoring.SIGMOID:
                scores_NE = jax.nn.sigmoid(logits_NE)
            case Scoring.SOFTMAX:
                scores_NE = jax.nn.softmax(logits_NE, axis=-1)
        choice_NE = jax.lax.stop_gradient(scores_NE)
        if config.correction_bias:
            choice_NE = choice_NE + self.correction_bias[...]
        if replay_Nk is None:
            _, ids_Nk = jax.lax.top_k(choice_NE, config.num_experts_per_tok)
        else:
            kept = jax.lax.stop_gradient(scores_NE)
            ids_Nk = choose(choice_NE, kept, replay_Nk, threshold=config.replay_threshold)
        weights_Nk = jnp.take_along_axis(scores_NE, ids_Nk, axis=-1)
        if config.norm_topk_prob:
            weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdims=True) + 1e-20)
        return Routing(ids=ids_Nk, weights=weights_Nk * config.routed_scaling_factor, scores=scores_NE)


def expert_counts(ids: jax.Array, valid: jax.Array, *, num_experts: int) -> jax.Array:
    """How many valid tokens chose each expert, float32 [E], of ids [..., k] and valid [...]."""
    chosen = jax.nn.one_hot(ids, num_experts, dtype=jnp.float32).sum(-2)
    return jnp.tensordot(valid.astype(jnp.float32), chosen, axes=valid.ndim)


def correction_bias_update(counts_LE: jax.Array, *, rate: jax.Array | float) -> jax.Array:
    """rate * sign(mean load - load), from counts of the whole global batch.

    Source: arXiv 2408.15664, algorithm 1.
    """
    return rate * jnp.sign(counts_LE.mean(axis=-1, keepdims=True) - counts_LE)
