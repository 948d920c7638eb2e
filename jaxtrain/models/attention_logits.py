"""The largest attention logit of each head, which QK-clip reads; independent of the attention kernel."""

# B batch, S sequence, C chunk of queries, H heads, K kv heads, G = H/K, h head dim

from __future__ import annotations

import jax
import jax.numpy as jnp

_CHUNK = 1024  # queries at a time: scores of a whole long row would not fit


def max_logits(q_BSHh: jax.Array, k_BSKh: jax.Array, segment_ids_BS: jax.Array) -> jax.Array:
    """Largest q.k / sqrt(h) over the pairs that attention sees (same document, not later) -> float32 [H].

    Queries and keys are rotated. No gradient flows. Padding (segment id 0) is ignored; a batch of only
    padding gives the smallest float32.
    """
    q_BSHh, k_BSKh = jax.lax.stop_gradient((q_BSHh, k_BSKh))
    b, s, heads, h = q_BSHh.shape
    positions = jnp.arange(s)

    def of_chunk(start: jax.Array, length: int) -> jax.Array:
        q_BCHh = jax.lax.dynamic_slice_in_dim(q_BSHh, start, length, axis=1)
        ids_BC = jax.lax.dynamic_slice_in_dim(segment_ids_BS, start, length, axis=1)
        q_BCKGh = q_BCHh.reshape(b, length, k_BSKh.shape[2], -1, h)
        scores = jnp.einsum("BCKGh,BTKh->BKGCT", q_BCKGh, k_BSKh, preferred_element_type=jnp.float32)
        seen_BCT = (ids_BC[:, :, None] == segment_ids_BS[:, None, :]) & (ids_BC[:, :, None] > 0)
        seen_BCT &= positions[None, None, :] <= (start + jnp.arange(length))[None, :, None]
        scores = jnp.where(seen_BCT[:, None, None], scores * h**-0.5, jnp.finfo(jnp.float32).min)
        return scores.max((0, 3, 4)).reshape(heads)

    if s <= _CHUNK:
        return of_chunk(jnp.int32(0), s)
    whole, rest = divmod(s, _CHUNK)
    found = jax.lax.map(lambda i: of_chunk(i * _CHUNK, _CHUNK), jnp.arange(whole)).max(0)
    return jnp.maximum(found, of_chunk(jnp.int32(whole * _CHUNK), rest)) if rest else found
