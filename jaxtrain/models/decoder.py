"""The decoder: embedding, a stack of dense layers, a stack of mixture-of-experts layers, final norm, head."""

# B batch, S sequence, T cache length, D model, V vocabulary, L layers, E experts, k experts a token

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtrain.models.attention_kernels import AttentionSegments, documents
from jaxtrain.models.balance import RouterStatistics, stacked, statistics, without_routers
from jaxtrain.models.config import ModelConfig, Remat
from jaxtrain.models.embedding import embed
from jaxtrain.models.layers import Cache, Layers, scan_layers
from jaxtrain.models.mtp import NextTokenLayers
from jaxtrain.models.norm import rms_norm
from jaxtrain.models.parameters import normal, ones, parameter
from jaxtrain.models.placement import constrain
from jaxtrain.models.rope import rotation


class Decoder(nnx.Module):
    mesh: Mesh | None = None  # set by Definition.bind

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        v, d, std = config.vocab_size, config.hidden_size, config.initializer_range
        self.embedding = parameter(rngs, (v, d), ("vocab", "embed"), normal(std))
        if config.first_k_dense_replace:
            self.dense = Layers(rngs, config, config.first_k_dense_replace, moe=False)
        if config.num_moe_layers:
            self.moe = Layers(rngs, config, config.num_moe_layers, moe=True)
        self.final_norm = parameter(rngs, (d,), ("embed_norm",), ones)
        if not config.tie_word_embeddings:
            self.lm_head = Head(rngs, config)
        if config.num_nextn_predict_layers:
            self.mtp = NextTokenLayers(rngs, config)

    def __call__(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        segment_ids_BS: jax.Array,
        *,
        replay_BSLk: jax.Array | None = None,
        return_experts: bool = False,
    ) -> tuple[jax.Array, RouterStatistics]:
        """Final hidden states [B, S, D] (after the norm) of packed documents; segment id 0 is padding.

        replay_BSLk: experts that the MoE layers keep where plausible, -1 = choose here (see `replay`).
        return_experts: `RouterStatistics.experts` holds the ids chosen.
        """
        packed = self._documents(segment_ids_BS)
        cos_sin = self._rotation(positions_BS)
        x = constrain(self._embed(tokens_BS, self.mesh), self.mesh)

        def body(
            layer: Layers, x: jax.Array, replay: jax.Array | None
        ) -> tuple[jax.Array, tuple[RouterStatistics | None, jax.Array | None]]:
            x, seen = layer.over_documents(x, cos_sin, packed, replay)
            router = statistics(seen.routing, segment_ids_BS, self.config, with_experts=return_experts)
            return constrain(x, self.mesh), (router, seen.max_logits)

        router = without_routers(segment_ids_BS, with_experts=return_experts)
        logits = []
        if self.config.first_k_dense_replace:
            x, (_, largest) = scan_layers(self.dense, body, x, remat=self.config.remat)
            logits.append(largest)
        if self.config.num_moe_layers:
            by_layer = None if replay_BSLk is None else jnp.moveaxis(replay_BSLk, 2, 0)
            x, (router, largest) = scan_layers(self.moe, body, x, by_layer, remat=self.config.remat)
            router = stacked(router)
            logits.append(largest)
        if self.config.measure_max_logits:
            router = replace(router, max_logits=jnp.concatenate(logits))
        return self._final(x), router

    def extend(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache, jax.Array]:
        """Runs S new tokens a row at `positions_BS` against a cache that already holds the earlier positions.

        Returns hidden states [B, S, D], the cache with the new positions written, and the experts each token
        used, int32 [B, S, Lm, k]. A position past the cache is not written.
        """
        cos_sin = self._rotation(positions_BS)
        x, first = self._embed(tokens_BS), 0
        used = []

        def body(
            layer: Layers, carry: tuple[jax.Array, Cache, jax.Array], _: None
        ) -> tuple[tuple[jax.Array, Cache, jax.Array], jax.Array | None]:
            x, cache, index = carry
            x, cache, routing = layer.over_cache(x, cos_sin, positions_BS, cache, index)
            ids = None if routing is None else routing.ids.reshape(*tokens_BS.shape, -1)
            return (x, cache, index + 1), ids

        for stack in self._stacks():
            (x, cache, _), ids = scan_layers(stack, body, (x, cache, jnp.int32(first)), remat=Remat.NONE)
            first += stack.input_norm.shape[0]
            if ids is not None:
                used.append(jnp.moveaxis(ids, 0, 2))
        experts = used[0] if used else jnp.zeros((*tokens_BS.shape, 0, 0), jnp.int32)
        return self._final(x), cache, experts

    def predict_further(
        self,
        hidden_BSD: jax.Array,
        tokens_nBS: jax.Array,
        positions_BS: jax.Array,
        segment_ids_BS: jax.Array,
        *,
        counted_nBS: jax.Array,
    ) -> tuple[jax.Array, RouterStatistics]:
        """Final hidden states [n, B, S, D] of the n MTP layers over packed documents, for the head.

        hidden_BSD: the result of `__call__`. tokens_nBS: token i + k of the document at depth k, see `mtp`.
        counted_nBS: segment ids of the tokens that router statistics count, 0 elsewhere.
        """
        packed = self._documents(segment_ids_BS)
        cos_sin = self._rotation(positions_BS)

        def body(
            depth: NextTokenLayers, hidden: jax.Array, inputs: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, tuple[jax.Array, RouterStatistics | None]]:
            tokens_BS, counted_BS = inputs
            x = constrain(depth.join(self._embed(tokens_BS, self.mesh), hidden), self.mesh)
            x, seen = depth.layer.over_documents(x, cos_sin, packed)
            hidden = constrain(depth.normalised(x), self.mesh)
            return hidden, (hidden, statistics(seen.routing, counted_BS, self.config))

        inputs = (tokens_nBS, counted_nBS)
        _, (hidden_nBSD, router) = scan_layers(self.mtp, body, hidden_BSD, inputs, remat=self.config.remat)
        return hidden_nBSD, router

    def draft(
        self,
        hidden_BSD: jax.Array,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        cache: Cache,
        *,
        depth: int,
    ) -> tuple[jax.Array, Cache]:
        """Runs MTP layer `depth` (from 0) on hidden states and the tokens that follow them.

        `logits` of the result predict the token after those. An engine drafts with depth 0 from `extend`'s
        hidden states and sampled tokens, then with the next depth, or the same one, from the result.
        positions_BS: of the hidden states. cache: of the MTP layers only.
        """
        graphdef, state = nnx.split(self.mtp)
        layer = nnx.merge(graphdef, jax.tree.map(lambda x: x[depth], state))
        x = layer.join(self._embed(tokens_BS), hidden_BSD)
        x, cache, _ = layer.layer.over_cache(x, self._rotation(positions_BS), positions_BS, cache, depth)
        return layer.normalised(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., V]; for sampling. Training losses project in chunks instead."""
        head_DV = self.embedding[...].T if self.config.tie_word_embeddings else self.lm_head.kernel[...]
        return jnp.matmul(hidden, head_DV.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def _stacks(self) -> list[Layers]:
        return [getattr(self, name) for name in ("dense", "moe") if hasattr(self, name)]

    def _embed(self, tokens_BS: jax.Array, mesh: Mesh | None = None) -> jax.Array:
        return embed(self.embedding[...], tokens_BS, dtype=self.config.compute_dtype, mesh=mesh)

    def _documents(self, segment_ids_BS: jax.Array) -> AttentionSegments:
        config = self.config
        return documents(
            segment_ids_BS, config.attention_implementation, dtype=config.compute_dtype, mesh=self.mesh
        )

    def _rotation(self, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return rotation(positions_BS, rotary_dim=c.rotary_dim, theta=c.rope_theta, scaling=c.rope_scaling)

    def _final(self, x_BSD: jax.Array) -> jax.Array:
        return rms_norm(x_BSD, self.final_norm[...], eps=self.config.rms_norm_eps)


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig) -> None:
        shape = (config.hidden_size, config.vocab_size)
        self.kernel = parameter(rngs, shape, ("embed", "vocab"), normal(config.initializer_range))
