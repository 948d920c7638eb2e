"""Grouped-query attention with optional q/k/v bias, QK-norm and partial RoPE.

Two uses of one set of weights: over packed documents (training) and against a cache (generation).
"""

# B batch, S query sequence, T key sequence, D model, H heads, K kv heads, G = H/K, h head dim

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtrain.models.attention_kernels import AttentionSegments, attend_documents, masked_attention
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.norm import rms_norm
from jaxtrain.models.parameters import Linear, ones, parameter
from jaxtrain.models.rope import rotate


class Attention(nnx.Module):
    mesh: Mesh | None = None  # set by Definition.bind

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
        """Attention to a cache under a mask, and output projection -> [B, S, D]."""
        return self._project_out(masked_attention(q_BSHh, k_BTKh, v_BTKh, mask_BST))

    def attend_documents(
        self, q_BSHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, documents: AttentionSegments
    ) -> jax.Array:
        """Causal attention within packed documents, and output projection -> [B, S, D]."""
        implementation = self.config.attention_implementation
        return self._project_out(
            attend_documents(q_BSHh, k_BSKh, v_BSKh, documents, implementation=implementation, mesh=self.mesh)
        )

    def _project_out(self, mixed_BSHh: jax.Array) -> jax.Array:
        return self.o_proj(mixed_BSHh.reshape(*mixed_BSHh.shape[:2], -1))
