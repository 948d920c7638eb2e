"""A stack of identical pre-norm layers, dense or mixture-of-experts, run by `lax.scan`."""

# B batch, S sequence, D model

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtrain.models.attention import Attention
from jaxtrain.models.attention_kernels import AttentionSegments
from jaxtrain.models.attention_logits import max_logits
from jaxtrain.models.config import ModelConfig, Remat
from jaxtrain.models.expert_parallel import parallel_experts
from jaxtrain.models.experts import Experts
from jaxtrain.models.mlp import SwiGLU
from jaxtrain.models.norm import rms_norm
from jaxtrain.models.parameters import ones, parameter
from jaxtrain.models.router import Router, Routing


class MoE(nnx.Module):
    """Router, routed experts and shared experts."""

    mesh: Mesh | None = None  # set by Definition.bind

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int) -> None:
        self.config = config
        self.router = Router(rngs, config, layers)
        self.experts = Experts(rngs, config, layers)
        if config.n_shared_experts:
            hidden = config.n_shared_experts * config.moe_intermediate_size
            self.shared = SwiGLU(rngs, layers, config.hidden_size, hidden, stddev=config.initializer_range)

    def __call__(self, x_BSD: jax.Array, replay_BSk: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """[B, S, D], and the routing of N = B * S tokens; on a mesh its arrays are [B, S, ...]."""
        if self.mesh is not None:
            return self._on_mesh(x_BSD, replay_BSk, self.mesh)
        x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
        replay_Nk = None if replay_BSk is None else replay_BSk.reshape(-1, replay_BSk.shape[-1])
        routing = self.router(x_ND, replay_Nk)
        out = self.experts(x_ND, routing)
        if self.config.n_shared_experts:
            out = out + self.shared(x_ND)
        return out.reshape(x_BSD.shape), routing

    def _on_mesh(
        self, x_BSD: jax.Array, replay_BSk: jax.Array | None, mesh: Mesh
    ) -> tuple[jax.Array, Routing]:
        """Does not flatten rows and sequence: their mesh axes differ, so that would move tokens."""
        routing = jax.vmap(self.router)(x_BSD, replay_BSk)
        out = parallel_experts(
            x_BSD,
            routing.ids,
            routing.weights,
            self.experts.kernels(x_BSD.dtype),
            mesh=mesh,
            implementation=self.config.expert_implementation,
        )
        if self.config.n_shared_experts:
            out = out + self.shared(x_BSD)
        return out, routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values [L, B, T, K, h] of L layers. Slot t holds the token at position t."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True)
class Observed:
    """What one layer reports beside its output.

    routing: None without a router. max_logits: float32 [H], largest attention logit of each head; None unless
    `measure_max_logits` is set.
    """

    routing: Routing | None
    max_logits: jax.Array | None


class Layers(nnx.Module):
    """A stack of identical pre-norm layers, parameters stacked on a leading axis."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int, *, moe: bool) -> None:
        self.config = config
        d, std = config.hidden_size, config.initializer_range
        self.input_norm = parameter(rngs, (layers, d), ("layers", "embed_norm"), ones)
        self.attention = Attention(rngs, config, layers)
        self.post_attention_norm = parameter(rngs, (layers, d), ("layers", "embed_norm"), ones)
        self.mlp = (
            MoE(rngs, config, layers)
            if moe
            else SwiGLU(rngs, layers, d, config.intermediate_size, stddev=std)
        )

    def over_documents(
        self,
        x_BSD: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        documents: AttentionSegments,
        replay_BSk: jax.Array | None = None,
    ) -> tuple[jax.Array, Observed]:
        """One layer over packed documents; call it inside `scan_layers`."""
        normed = rms_norm(x_BSD, self.input_norm[...], eps=self.config.rms_norm_eps)
        q, k, v = self.attention.project(normed, *cos_sin)
        logits = max_logits(q, k, documents.segment_ids) if self.config.measure_max_logits else None
        x_BSD = x_BSD + self.attention.attend_documents(q, k, v, documents)
        x_BSD, routing = self.feed_forward(x_BSD, replay_BSk)
        return x_BSD, Observed(routing, logits)

    def over_cache(
        self,
        x_BSD: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        positions_BS: jax.Array,
        cache: Cache,
        index: jax.Array | int,
    ) -> tuple[jax.Array, Cache, Routing | None]:
        """One layer over S new tokens a row; reads and writes the keys and values at `index`."""
        normed = rms_norm(x_BSD, self.input_norm[...], eps=self.config.rms_norm_eps)
        q, k, v = self.attention.project(normed, *cos_sin)
        rows = jnp.arange(positions_BS.shape[0])[:, None]
        cache = Cache(
            keys=cache.keys.at[index, rows, positions_BS].set(k, mode="drop"),
            values=cache.values.at[index, rows, positions_BS].set(v, mode="drop"),
        )
        mask = positions_BS[:, :, None] >= jnp.arange(cache.keys.shape[2])[None, None, :]
        attended = self.attention.attend(q, cache.keys[index], cache.values[index], mask)
        x_BSD, routing = self.feed_forward(x_BSD + attended)
        return x_BSD, cache, routing

    def feed_forward(
        self, x_BSD: jax.Array, replay_BSk: jax.Array | None = None
    ) -> tuple[jax.Array, Routing | None]:
        normed = rms_norm(x_BSD, self.post_attention_norm[...], eps=self.config.rms_norm_eps)
        if isinstance(self.mlp, SwiGLU):
            return x_BSD + self.mlp(normed), None
        y, routing = self.mlp(normed, replay_BSk)
        return x_BSD + y, routing


def scan_layers(
    stack: nnx.Module,
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    inputs: Any = None,
    *,
    remat: Remat,
) -> tuple[Any, Any]:
    """Runs `body(layer, carry, input) -> (carry, output)` over the stacked layers with `lax.scan`.

    inputs: a pytree of arrays whose leading axis is the layers, or None for every layer.
    """
    graphdef, state = nnx.split(stack)

    def step(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
        layer_state, layer_input = layer
        return body(nnx.merge(graphdef, layer_state), carry, layer_input)

    if remat is Remat.FULL:
        step = jax.checkpoint(step)
    elif remat is Remat.DOTS:
        step = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return jax.lax.scan(step, carry, (state, inputs))
