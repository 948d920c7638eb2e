"""Layers that predict further tokens (multi-token prediction): each joins two inputs and runs a MoE layer.

Layer k sees, at position i, the hidden state of the depth before and the embedding of token i + k, and
predicts token i + k + 1:

    h'_k = eh_proj [RMSNorm(Emb(t_{i+k})); RMSNorm(h_{k-1})],   h_k = RMSNorm(Layer(h'_k))

h_0 is the decoder's final hidden state. Embedding and head are the decoder's own.
Source: DeepSeek-V3 (arXiv 2412.19437), eq. 21-23; the order of the two halves, and that depth k + 1 sees the
normalised state, as in published GLM-4.5 weights and transformers' MtpLayer.
"""

# B batch, S sequence, D model, n MTP layers

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.layers import Layers
from jaxtrain.models.norm import rms_norm
from jaxtrain.models.parameters import Linear, ones, parameter


class NextTokenLayers(nnx.Module):
    """Stacked, as all layers are: call the methods inside `scan_layers`, or on one layer's slice."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig) -> None:
        self.config = config
        n, d, std = config.num_nextn_predict_layers, config.hidden_size, config.initializer_range
        self.enorm = parameter(rngs, (n, d), ("layers", "embed_norm"), ones)
        self.hnorm = parameter(rngs, (n, d), ("layers", "embed_norm"), ones)
        self.eh_proj = Linear(rngs, n, 2 * d, d, (None, "embed"), stddev=std)
        self.layer = Layers(rngs, config, n, moe=True)
        self.output_norm = parameter(rngs, (n, d), ("layers", "embed_norm"), ones)

    def join(self, embedded_BSD: jax.Array, hidden_BSD: jax.Array) -> jax.Array:
        """Input of the layer, from the next token's embedding and the state that it follows."""
        eps = self.config.rms_norm_eps
        halves = (
            rms_norm(embedded_BSD, self.enorm[...], eps=eps),
            rms_norm(hidden_BSD, self.hnorm[...], eps=eps),
        )
        return self.eh_proj(jnp.concatenate(halves, axis=-1))

    def normalised(self, x_BSD: jax.Array) -> jax.Array:
        """Normalised output: input of the head and of the next depth."""
        return rms_norm(x_BSD, self.output_norm[...], eps=self.config.rms_norm_eps)
