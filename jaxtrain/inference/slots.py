"""Device side of the embedded engine: a fixed number of slots decoded together, three compiled programs.

`prefill` runs distinct prompts once; `insert` copies their keys and values into the slots of every request
that shares them; `decode` advances all slots by a few tokens. Shapes never change, so weights can be swapped
between two calls while requests run (keep_kv), or the cache rebuilt under the new weights (recompute_kv).
"""

# B slots, T cache length, P prompt length, N prompts, M insertions, C tokens of a decode call, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Values
from jaxtrain.models.decoder import Cache
from jaxtrain.models.definition import Definition, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """State of every slot.

    cache: keys and values of positions before `position`. token: next input, at `position` (int32 [B]).
    generated, limit: tokens made and allowed. active: bool [B]. temperature: float32 [B], 0 is greedy.
    seed: uint32 [B]; token t of a request uses the key (seed, t), whatever the other slots hold.
    """

    cache: Cache
    token: jax.Array
    position: jax.Array
    generated: jax.Array
    limit: jax.Array
    active: jax.Array
    temperature: jax.Array
    seed: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodedTokens:
    """Tokens of C decode steps.

    tokens int32 [C, B], logprobs float32 [C, B], valid bool [C, B]; experts int32 [C, B, Lm, k].
    """

    tokens: jax.Array
    logprobs: jax.Array
    valid: jax.Array
    experts: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Insertion:
    """Requests entering slots; entry i uses prompt `source[i]`.

    A slot index of B is an empty entry. All [M].
    """

    slot: Values
    source: Values
    token: Values
    position: Values
    limit: Values
    temperature: Values
    seed: Values


def empty_cache(definition: Definition, *, batch: int, length: int) -> Cache:
    config = definition.config
    shape = (config.num_hidden_layers, batch, length, config.num_key_value_heads, config.head_dim)
    zeros = partial(jnp.zeros, shape, config.compute_dtype)
    return Cache(keys=zeros(), values=zeros())


def empty_slots(definition: Definition, *, slots: int, length: int) -> Slots:
    """Idle slots; their position is past the cache, so they write nothing."""
    ints = partial(jnp.zeros, (slots,), jnp.int32)
    return Slots(
        cache=empty_cache(definition, batch=slots, length=length),
        token=ints(),
        position=jnp.full((slots,), length, jnp.int32),
        generated=ints(),
        limit=ints(),
        active=jnp.zeros((slots,), bool),
        temperature=jnp.zeros((slots,), jnp.float32),
        seed=jnp.zeros((slots,), jnp.uint32),
    )


@partial(jax.jit, static_argnums=0)
def prefill(definition_static: _Static, params: Params, tokens_NP: jax.Array) -> tuple[Cache, jax.Array]:
    """Keys and values of the prompts, and the experts their tokens used, int32 [N, P, Lm, k]."""
    definition = definition_static.definition
    n, p = tokens_NP.shape
    positions = jnp.broadcast_to(jnp.arange(p), (n, p))
    cache = empty_cache(definition, batch=n, length=p)
    _, cache, experts = definition.bind(params).extend(tokens_NP, positions, cache)
    return cache, experts


@partial(jax.jit, donate_argnums=0)
def insert(slots: Slots, prompts: Cache, entry: Insertion) -> Slots:
    """Copies prompts into slots and starts them at their last prompt token, which `decode` runs again."""
    p = prompts.keys.shape[2]
    at = entry.slot

    def put(array: jax.Array, value: Values) -> jax.Array:
        return array.at[at].set(value, mode="drop")

    return Slots(
        cache=Cache(
            keys=slots.cache.keys.at[:, at, :p].set(prompts.keys[:, entry.source], mode="drop"),
            values=slots.cache.values.at[:, at, :p].set(prompts.values[:, entry.source], mode="drop"),
        ),
        token=put(slots.token, entry.token),
        position=put(slots.position, entry.position),
        generated=put(slots.generated, jnp.zeros_like(at)),
        limit=put(slots.limit, entry.limit),
        active=put(slots.active, jnp.ones_like(at, dtype=bool)),
        temperature=put(slots.temperature, entry.temperature),
        seed=put(slots.seed, entry.seed),
    )


@partial(jax.jit, donate_argnums=0)
def release(slots: Slots, stopped: jax.Array) -> Slots:
    """Stops the slots where `stopped` (bool [B]) is True."""
    return replace(slots, active=slots.active & ~stopped)


def with_cache(slots: Slots, cache: Cache) -> Slots:
    """The same slots over another cache of the same shape."""
    return replace(slots, cache=cache)


@partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def decode(
    definition_static: _Static, params: Params, slots: Slots, steps: int, stop_ids_BK: jax.Array
) -> tuple[Slots, DecodedTokens]:
    """Advances every active slot by up to `steps` tokens.

    A slot stops at its limit or at one of its stop ids (int32 [B, K], filled up with -1).
    """
    definition = definition_static.definition
    length = slots.cache.keys.shape[2]

    def step(slots: Slots, _: None) -> tuple[Slots, DecodedTokens]:
        model = definition.bind(params)
        position = jnp.where(slots.active, slots.position, length)
        hidden, cache, experts = model.extend(slots.token[:, None], position[:, None], slots.cache)
        token, logprob = sample(model.logits(hidden[:, 0]), slots.temperature, slots.seed, slots.generated)
        generated = slots.generated + slots.active
        stopped = (token[:, None] == stop_ids_BK).any(-1) | (generated >= slots.limit)
        moved = replace(
            slots,
            cache=cache,
            token=jnp.where(slots.active, token, slots.token),
            position=slots.position + slots.active,
            generated=generated,
            active=slots.active & ~stopped,
        )
        return moved, DecodedTokens(token, logprob, slots.active, experts[:, 0])

    return jax.lax.scan(step, slots, None, length=steps)


def sample(
    logits_BV: jax.Array, temperature_B: jax.Array, seed_B: jax.Array, index_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 [B] and their log-probabilities float32 [B] under the distribution sampled from.

    Temperature 0 takes the most likely token and reports its log-probability at temperature 1.
    """
    scale = jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    logprobs_BV = jax.nn.log_softmax(logits_BV / scale, axis=-1)
    keys = jax.vmap(lambda seed, index: jax.random.fold_in(jax.random.key(seed), index))(seed_B, index_B)
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(keys)
    noise_BV = jnp.where(temperature_B[:, None] > 0, noise_BV, 0.0)
    token_B = jnp.argmax(logprobs_BV + noise_BV, axis=-1).astype(jnp.int32)
    return token_B, jnp.take_along_axis(logprobs_BV, token_B[:, None], axis=-1)[:, 0]


@dataclass(frozen=True, eq=False)
class _Static:
    """A definition as a static argument of jit, compared by its configuration."""

    definition: Definition

    def __hash__(self) -> int:
        return hash(self.definition.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and other.definition.config == self.definition.config


def static(definition: Definition) -> _Static:
    return _Static(definition)
