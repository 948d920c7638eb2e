"""Attention over a sequence that is split between devices: keys and values are sent around a ring.

Every device keeps its queries. In each step it attends to the keys it holds and sends them to the next
device, so a device's memory and traffic a step do not depend on the number of devices. In the backward pass
the gradients of keys and values move with them, once around the ring, and end on the device that owns them.
Source: Ring Attention (arXiv 2310.01889).

Balance: a causal mask gives the last part of a sequence the most work. Before attention, halves are exchanged
so that device i of c holds halves i and 2c-1-i of the 2c, which is the same work on every device. After
attention they are sent back, so the rest of the model has the original order. Chunks of keys that no query
may see are skipped, those of other documents too.
"""

# B rows, S queries of a device, K kv heads, G query heads of one kv head, h head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.attention_chunked import (
    PartialAttention,
    Tokens,
    attend_part,
    attend_part_gradient,
    merge,
)


@dataclass(frozen=True)
class Ring:
    """Devices among which a sequence is split: a mesh axis and its size; no axis for one device."""

    axis: str | None = None
    size: int = 1

    def passed_on(self, tree: Any) -> Any:
        """The arrays `tree` of the previous device of the ring."""
        if self.size == 1:
            return tree
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)


def ring_attention(
    q_BSKGh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, segments_BS: jax.Array, *, ring: Ring
) -> jax.Array:
    """Causal attention within documents -> [B, S, K, G, h] in the dtype of q.

    Arguments are this device's part of the sequence, in order; with a ring of more than one device this runs
    inside `shard_map`. Raises ValueError if a part cannot be halved.
    """
    length = q_BSKGh.shape[1]
    if ring.size == 1:
        tokens = Tokens(index=jnp.arange(length, dtype=jnp.int32), segments=segments_BS)
        return _attend(ring, q_BSKGh, k_BSKh, v_BSKh, tokens)
    if length % 2:
        raise ValueError(
            f"a sequence split over {ring.size} devices of mesh axis {ring.axis!r} leaves {length} tokens on "
            f"each, an odd number; make the sequence a multiple of {2 * ring.size}"
        )
    index = jax.lax.axis_index(ring.axis) * length + jnp.arange(length, dtype=jnp.int32)
    q, k, v, segments = (_deal(x, ring) for x in (q_BSKGh, k_BSKh, v_BSKh, segments_BS))
    tokens = Tokens(index=_deal(index[None], ring)[0], segments=segments)
    return _collect(_attend(ring, q, k, v, tokens), ring)


def _attend(
    ring: Ring, q_BSKGh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, tokens: Tokens
) -> jax.Array:
    @jax.custom_vjp
    def run(q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> jax.Array:
        return _forward(ring, q, k, v, tokens).out.astype(q.dtype)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> tuple[jax.Array, tuple]:
        whole = _forward(ring, q, k, v, tokens)
        return whole.out.astype(q.dtype), (q, k, v, tokens, whole)

    def backward(residual: tuple, grad: jax.Array) -> tuple:
        q, k, v, tokens, whole = residual
        grads = _backward(ring, q, k, v, tokens, whole, grad)
        none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tokens)
        return (*(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), none)

    run.defvjp(forward, backward)
    return run(q_BSKGh, k_BSKh, v_BSKh, tokens)


def _forward(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> PartialAttention:
    whole = attend_part(q, k, v, tokens, tokens)
    if ring.size == 1:
        return whole

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        whole, visitors = carry
        k, v, keys = visitors = ring.passed_on(visitors)
        return (merge(whole, attend_part(q, k, v, tokens, keys)), visitors), None

    (whole, _), _ = jax.lax.scan(step, (whole, (k, v, tokens)), length=ring.size - 1)
    return whole


def _backward(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    whole: PartialAttention,
    grad: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    grads = attend_part_gradient(q, k, v, tokens, tokens, whole, grad)
    if ring.size == 1:
        return grads
    grad_q, *grads_kv = grads

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        grad_q, grads_kv, visitors = carry
        grads_kv, visitors = ring.passed_on((grads_kv, visitors))
        k, v, keys = visitors
        add_q, *adds = attend_part_gradient(q, k, v, tokens, keys, whole, grad)
        grads_kv = [g + a for g, a in zip(grads_kv, adds, strict=True)]
        return (grad_q + add_q, grads_kv, visitors), None

    (grad_q, grads_kv, _), _ = jax.lax.scan(step, (grad_q, grads_kv, (k, v, tokens)), length=ring.size - 1)
    grad_k, grad_v = ring.passed_on(grads_kv)
    return grad_q, grad_k, grad_v


def _deal(x_BSx: jax.Array, ring: Ring) -> jax.Array:
    """Halves 2i and 2i+1 of device i -> halves i and 2c-1-i; `Tokens.index` holds their order."""
    halves = jnp.split(x_BSx, 2, axis=1)
    return jnp.concatenate(
        [
            jax.lax.ppermute(half, ring.axis, pairs)
            for half, pairs in zip(halves, _deals(ring.size), strict=True)
        ],
        axis=1,
    )


def _collect(x_BSx: jax.Array, ring: Ring) -> jax.Array:
    """The inverse of `_deal`."""
    halves = jnp.split(x_BSx, 2, axis=1)
    back = [[(target, source) for source, target in pairs] for pairs in _deals(ring.size)]
    return jnp.concatenate(
        [jax.lax.ppermute(half, ring.axis, pairs) for half, pairs in zip(halves, back, strict=True)], axis=1
    )


def _deals(size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(source, target) of the first halves of all devices, and of the second."""
    target = lambda half: half if half < size else 2 * size - 1 - half  # noqa: E731
    return [(i, target(2 * i)) for i in range(size)], [(i, target(2 * i + 1)) for i in range(size)]
