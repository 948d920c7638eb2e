"""Grouped-query attention with optional q/k/v bias, QK-norm and partial RoPE.

Two uses of one set of weights: over packed documents (training) and against a cache (generation).
"""

# B batch, S query sequence, T key sequence, D model, H heads, K kv heads, G = H/K, h head dim

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.norm import rms_norm
from jaxtrain.models.parameters import Linear, ones, parameter
from jaxtrain.models.rope import rotate


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int) -> None:
        self.config = config
        d, h, std = config.hidden_size, config.head_dim, config.initializer_range
        q, kv, bias = config.num_attention_heads * h, config.num_key_value_heads * h, config.attention_bias
        self.q_proj = Linear(rngs, layers, d, q, ("embed", "heads"), stddev=std, bias=bias)
        self.k_proj = Linear(rngs, layers, d, kv, ("embed", "kv_heads"), stddev=std, bias=bias)
        self.v_proj = Linear(rngs, layers, d, kv, ("embed", "kv_heads"), stddev=std, bias=bias)
        self.o_proj = Linear(rngs, layers, q, d, ("heads", "embed"), stddev=std)
        if config.use_qk_norm:
            self.q_norm = parameter(rngs, (layers, h), ("layers", "head_dim"), ones)
            self.k_norm = parameter(rngs, (layers, h), ("layers", "head_dim"), ones)

    def project(
        self, x_BSD: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B,S,H,h] and keys [B,S,K,h], and values [B,S,K,h]."""
        config, shape = self.config, x_BSD.shape[:2]
        q_BSHh = self.q_proj(x_BSD).reshape(*shape, config.num_attention_heads, config.head_dim)
        k_BSKh = self.k_proj(x_BSD).reshape(*shape, config.num_key_value_heads, config.head_dim)
        v_BSKh = self.v_proj(x_BSD).reshape(*shape, config.num_key_value_heads, config.head_dim)
        if config.use_qk_norm:
            q_BSHh = rms_norm(q_BSHh, self.q_norm[...], eps=config.rms_norm_eps)
            k_BSKh = rms_norm(k_BSKh, self.k_norm[...], eps=config.rms_norm_eps)
        return rotate(q_BSHh, cos, sin), rotate(k_BSKh, cos, sin), v_BSKh

    def attend(
        self, q_BSHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, mask_BST: jax.Array
    ) -> jax.Array:
        """Softmax attention (float32 statistics) and output projection -> [B, S, D]."""
        b, s, _, h = q_BSHh.shape
        k_heads = k_BTKh.shape[2]
        q_BSKGh = q_BSHh.reshape(b, s, k_heads, -1, h)
        scores = jnp.einsum("BSKGh,BTKh->BKGST", q_BSKGh, k_BTKh, preferred_element_type=jnp.float32)
        scores = jnp.where(mask_BST[:, None, None], scores * h**-0.5, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKh.dtype)
        mixed = jnp.einsum("BKGST,BTKh->BSKGh", weights, v_BTKh)
        return self.o_proj(mixed.reshape(b, s, -1))


def document_mask(segment_ids_BS: jax.Array) -> jax.Array:
    """[B, S, S], True where a query may see a key: same document, not later. Padding has segment id 0."""
    same = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    length = segment_ids_BS.shape[1]
    return same & jnp.tril(jnp.ones((length, length), bool))[None]
