"""The decoder: embedding, a stack of dense layers, a stack of mixture-of-experts layers, final norm, head.

Parameters travel as a flat mapping from path to array ("moe/attention/q_proj/kernel"), the same paths that
optimizer rules, checkpoints, sharding tables and the weight chain name.
"""

# B batch, S sequence, T cache length, D model, V vocabulary, L layers, E experts, k experts a token

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.attention import Attention, document_mask
from jaxtrain.models.config import ModelConfig, Remat
from jaxtrain.models.experts import Experts
from jaxtrain.models.mlp import SwiGLU
from jaxtrain.models.norm import rms_norm
from jaxtrain.models.parameters import Buffer, normal, ones, parameter
from jaxtrain.models.rope import rotation
from jaxtrain.models.router import Router, Routing, expert_counts

Params = Mapping[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStatistics:
    """Sums over valid tokens, one row a MoE layer.

    counts: float32 [Lm, E], tokens that chose each expert.
    balance: float32 [Lm], sequence-level balance loss summed over sequences' tokens (see `sequence_balance`).
    """

    counts: jax.Array
    balance: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values [L, B, T, K, h] of all layers, dense first. Slot t holds the token at position t."""

    keys: jax.Array
    values: jax.Array


class MoE(nnx.Module):
    """Router, routed experts and shared experts."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int) -> None:
        self.config = config
        self.router = Router(rngs, config, layers)
        self.experts = Experts(rngs, config, layers)
        if config.n_shared_experts:
            hidden = config.n_shared_experts * config.moe_intermediate_size
            self.shared = SwiGLU(rngs, layers, config.hidden_size, hidden, stddev=config.initializer_range)

    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, Routing]:
        x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
        routing = self.router(x_ND)
        out = self.experts(x_ND, routing)
        if self.config.n_shared_experts:
            out = out + self.shared(x_ND)
        return out.reshape(x_BSD.shape), routing


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

    def feed_forward(self, x_BSD: jax.Array) -> tuple[jax.Array, Routing | None]:
        normed = rms_norm(x_BSD, self.post_attention_norm[...], eps=self.config.rms_norm_eps)
        out = self.mlp(normed)
        y, routing = out if isinstance(out, tuple) else (out, None)
        return x_BSD + y, routing


class Decoder(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        v, d, std = config.vocab_size, config.hidden_size, config.initializer_range
        self.embedding = parameter(rngs, (v, d), ("vocab", "embed"), normal(std))
        if config.first_k_dense_replace:
            self.dense = Layers(rngs, config, config.first_k_dense_replace, moe=False)
        if config.num_moe_layers:
            self.moe = Layers(rngs, config, config.num_moe_layers, moe=True)
        self.final_norm = parameter(rngs, (d,), ("embed_norm",), ones)
        self.lm_head = Head(rngs, config)

    def __call__(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, segment_ids_BS: jax.Array
    ) -> tuple[jax.Array, RouterStatistics]:
        """Final hidden states [B, S, D] (after the norm) of packed documents; segment id 0 is padding."""
        mask = document_mask(segment_ids_BS)
        cos_sin = self._rotation(positions_BS)
        x = self._embed(tokens_BS)

        def body(layer: Layers, x: jax.Array) -> tuple[jax.Array, RouterStatistics | None]:
            normed = rms_norm(x, layer.input_norm[...], eps=self.config.rms_norm_eps)
            q, k, v = layer.attention.project(normed, *cos_sin)
            x, routing = layer.feed_forward(x + layer.attention.attend(q, k, v, mask))
            return x, _statistics(routing, segment_ids_BS, self.config)

        for stack in self._stacks():
            x, statistics = _scan(stack, body, x, remat=self.config.remat)
        if not self.config.num_moe_layers:
            statistics = RouterStatistics(counts=jnp.zeros((0, 0)), balance=jnp.zeros((0,)))
        return self._final(x), statistics

    def extend(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache, jax.Array]:
        """Runs S new tokens a row at `positions_BS` against a cache that already holds the earlier positions.

        Returns hidden states [B, S, D], the cache with the new positions written, and the experts each token
        used, int32 [B, S, Lm, k]. A position past the cache is written nowhere.
        """
        cos_sin = self._rotation(positions_BS)
        mask = positions_BS[:, :, None] >= jnp.arange(cache.keys.shape[2])[None, None, :]
        rows = jnp.arange(tokens_BS.shape[0])[:, None]
        x, first = self._embed(tokens_BS), 0
        used = []
        for stack in self._stacks():
            count = stack.input_norm.shape[0]

            def body(
                layer: Layers, carry: tuple[jax.Array, Cache, jax.Array]
            ) -> tuple[tuple[jax.Array, Cache, jax.Array], jax.Array | None]:
                x, cache, index = carry
                normed = rms_norm(x, layer.input_norm[...], eps=self.config.rms_norm_eps)
                q, k, v = layer.attention.project(normed, *cos_sin)
                cache = Cache(
                    keys=cache.keys.at[index, rows, positions_BS].set(k, mode="drop"),
                    values=cache.values.at[index, rows, positions_BS].set(v, mode="drop"),
                )
                attended = layer.attention.attend(q, cache.keys[index], cache.values[index], mask)
                x, routing = layer.feed_forward(x + attended)
                ids = None if routing is None else routing.ids.reshape(*tokens_BS.shape, -1)
                return (x, cache, index + 1), ids

            (x, cache, _), ids = _scan(stack, body, (x, cache, jnp.int32(first)), remat=Remat.NONE)
            first += count
            if ids is not None:
                used.append(jnp.moveaxis(ids, 0, 2))
        experts = used[0] if used else jnp.zeros((*tokens_BS.shape, 0, 0), jnp.int32)
        return self._final(x), cache, experts

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., V]; for sampling. Training losses project in chunks instead."""
        kernel = self.lm_head.kernel[...].astype(hidden.dtype)
        return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)

    def _stacks(self) -> list[Layers]:
        return [getattr(self, name) for name in ("dense", "moe") if hasattr(self, name)]

    def _embed(self, tokens_BS: jax.Array) -> jax.Array:
        return self.embedding[...].astype(self.config.compute_dtype)[tokens_BS]

    def _rotation(self, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotation(positions_BS, rotary_dim=self.config.rotary_dim, theta=self.config.rope_theta)

    def _final(self, x_BSD: jax.Array) -> jax.Array:
        return rms_norm(x_BSD, self.final_norm[...], eps=self.config.rms_norm_eps)


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig) -> None:
        shape = (config.hidden_size, config.vocab_size)
        self.kernel = parameter(rngs, shape, ("embed", "vocab"), normal(config.initializer_range))


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
    chosen_BSE = jax.nn.one_hot(routing.ids, e, dtype=jnp.float32).sum(1).reshape(b, s, e)
    share_BSE = (routing.scores / (routing.scores.sum(-1, keepdims=True) + 1e-20)).reshape(b, s, e)
    f_BE = jnp.einsum("BSE,BS->BE", chosen_BSE, valid_BS) * (e / k) / tokens_B[:, None]
    p_BE = jnp.einsum("BSE,BS->BE", share_BSE, valid_BS) / tokens_B[:, None]
    return (jax.lax.stop_gradient(f_BE) * p_BE).sum(-1) @ valid_BS.sum(-1)


def _statistics(
    routing: Routing | None, segment_ids_BS: jax.Array, config: ModelConfig
) -> RouterStatistics | None:
    if routing is None:
        return None
    valid_N = segment_ids_BS.reshape(-1) > 0
    return RouterStatistics(
        counts=expert_counts(routing.ids, valid_N, num_experts=config.n_routed_experts),
        balance=sequence_balance(routing, segment_ids_BS, config),
    )


def _scan(stack: Layers, body, carry, *, remat: Remat):
    """Runs `body(layer, carry) -> (carry, output)` over the stacked layers with `lax.scan`."""
    graphdef, state = nnx.split(stack)

    def step(carry, layer_state):
        return body(nnx.merge(graphdef, layer_state), carry)

    if remat is Remat.FULL:
        step = jax.checkpoint(step)
    elif remat is Remat.DOTS:
        step = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return jax.lax.scan(step, carry, state)


@dataclass(frozen=True)
class Definition:
    """A decoder without its numbers.

    shapes: path -> shape of every parameter and buffer; axes: path -> logical axis names, one a dimension.
    buffers: paths that have no gradient.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    shapes: dict[str, jax.ShapeDtypeStruct]
    axes: dict[str, tuple[str | None, ...]]
    buffers: frozenset[str]

    def bind(self, params: Params) -> Decoder:
        """The module holding `params`; works on tracers, so call it inside jit."""
        missing = self.shapes.keys() - params.keys()
        if missing:
            raise KeyError(f"parameters missing: {sorted(missing)}")
        flat = {
            tuple(path.split("/")): (Buffer if path in self.buffers else nnx.Param)(params[path])
            for path in self.shapes
        }
        return nnx.merge(self.graphdef, nnx.from_flat_state(flat))


@lru_cache(maxsize=8)
def define(config: ModelConfig) -> Definition:
    """Shapes and logical axes by shape evaluation; allocates nothing."""
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    flat = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    return Definition(
        config=config,
        graphdef=graphdef,
        shapes={
            path: jax.ShapeDtypeStruct(v.get_value().shape, v.get_value().dtype) for path, v in flat.items()
        },
        axes={path: v.get_metadata()["logical_axes"] for path, v in flat.items()},
        buffers=frozenset(path for path, v in flat.items() if isinstance(v, Buffer)),
    )


@partial(jax.jit, static_argnums=0)
def _initialize(config: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
    model = Decoder(config, rngs=nnx.Rngs(params=key))
    return {"/".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(model))}


def initialize(
    config: ModelConfig, *, seed: int, shardings: Mapping[str, jax.sharding.Sharding] | None = None
) -> dict[str, jax.Array]:
    """Random parameters, created where `shardings` places them.

    The same seed gives the same numbers on any mesh.
    """
    key = jax.random.key(seed)
    if shardings is None:
        return _initialize(config, key)
    out = {path: shardings[path] for path in define(config).shapes}
    return jax.jit(_initialize, static_argnums=0, out_shardings=out)(config, key)
