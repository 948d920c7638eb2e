"""Softmax attention of packed documents in memory linear in the sequence: online softmax over chunks of keys.

A chunk of queries is combined only with chunks of keys that it may attend to: chunks of later tokens and of
other documents are skipped. The backward pass recomputes scores from the log-sum-exp of each query.
Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.

Results of disjoint sets of keys can be merged (`merge`), which is what attention over several devices does.
"""

# B rows, S queries, T keys, K kv heads, G query heads of a kv head, h head dim, n chunks, C tokens of one

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

CHUNK = 512
NOTHING = -1e30  # log-sum-exp of no key: finite, so that differences of two stay numbers
_QUERY_PADDING, _KEY_PADDING = -1, -2  # segments that equal no other


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Identity of some tokens. index: int32 [S], place in the whole row. segments: int32 [B, S]."""

    index: jax.Array
    segments: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialAttention:
    """Attention over some keys.

    out: float32 [B, S, K, G, h]. lse: float32 [B, K, G, S], log-sum-exp of the scores, NOTHING without a key.
    """

    out: jax.Array
    lse: jax.Array


def merge(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    """Attention over the keys of both."""
    lse = jnp.logaddexp(one.lse, other.lse)
    weigh = lambda part: jnp.moveaxis(jnp.exp(part.lse - lse), -1, 1)[..., None] * part.out  # noqa: E731
    return PartialAttention(out=weigh(one) + weigh(other), lse=lse)


def attend_part(
    q_BSKGh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, queries: Tokens, keys: Tokens
) -> PartialAttention:
    """Scaled softmax attention of queries to those keys that are not later and of the same document."""
    s = q_BSKGh.shape[1]
    q_n, queries_n = _chunks(q_BSKGh), _token_chunks(queries, _QUERY_PADDING)
    k_n, v_n, keys_n = _chunks(k_BTKh), _chunks(v_BTKh), _token_chunks(keys, _KEY_PADDING)

    def of_queries(_: None, chunk: tuple[jax.Array, Tokens]) -> tuple[None, PartialAttention]:
        q, queries = chunk
        b, c, k_heads, group, h = q.shape
        start = (
            jnp.full((b, k_heads, group, c), NOTHING, jnp.float32),
            jnp.zeros((b, k_heads, group, c), jnp.float32),
            jnp.zeros((b, k_heads, group, c, h), jnp.float32),
        )

        def of_keys(carry: tuple, chunk: tuple) -> tuple[tuple, None]:
            k, v, keys = chunk

            def update(carry: tuple) -> tuple:
                largest, total, mixed = carry
                scores, visible = _scores(q, k, queries, keys)
                new = jnp.maximum(largest, jnp.where(visible, scores, NOTHING).max(-1))
                weights = jnp.where(visible, jnp.exp(scores - new[..., None]), 0.0)
                old = jnp.exp(largest - new)
                product = jnp.einsum(
                    "BKGST,BTKh->BKGSh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
                )
                return new, total * old + weights.sum(-1), mixed * old[..., None] + product

            return jax.lax.cond(_meet(queries, keys), update, lambda carry: carry, carry), None

        (largest, total, mixed), _ = jax.lax.scan(of_keys, start, (k_n, v_n, keys_n))
        seen = total > 0
        out = mixed / jnp.where(seen, total, 1.0)[..., None]
        lse = jnp.where(seen, largest + jnp.log(jnp.where(seen, total, 1.0)), NOTHING)
        return None, PartialAttention(out=jnp.moveaxis(out, 3, 1), lse=lse)

    _, parts = jax.lax.scan(of_queries, None, (q_n, queries_n))
    lse = jnp.moveaxis(parts.lse, 0, -2)
    return PartialAttention(out=_whole(parts.out, s), lse=lse.reshape(*lse.shape[:-2], -1)[..., :s])


def attend_part_gradient(
    q_BSKGh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    queries: Tokens,
    keys: Tokens,
    whole: PartialAttention,
    grad_out_BSKGh: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The part of these keys in the float32 gradients of q, k and v.

    whole: attention over all keys; these keys may be a part of them. grad_out: the gradient of its `out`.
    """
    s, t = q_BSKGh.shape[1], k_BTKh.shape[1]
    delta_BKGS = jnp.einsum("BSKGh,BSKGh->BKGS", grad_out_BSKGh.astype(jnp.float32), whole.out)
    per_query = jnp.moveaxis(jnp.stack([whole.lse, delta_BKGS]), -1, 2)  # [2, B, S, K, G]
    lse_n, delta_n = (_chunks(a) for a in per_query)
    q_n, queries_n = _chunks(q_BSKGh), _token_chunks(queries, _QUERY_PADDING)
    grad_n = _chunks(grad_out_BSKGh)
    k_n, v_n, keys_n = _chunks(k_BTKh), _chunks(v_BTKh), _token_chunks(keys, _KEY_PADDING)
    scale = q_BSKGh.shape[-1] ** -0.5

    def of_queries(carry: tuple, chunk: tuple) -> tuple[tuple, jax.Array]:
        q, queries, lse, delta, grad = chunk
        lse, delta = (jnp.moveaxis(a, 1, -1)[..., None] for a in (lse, delta))

        def of_keys(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
            grad_q, grad_k_n, grad_v_n = carry
            k, v, keys = jax.tree.map(lambda a: a[index], (k_n, v_n, keys_n))

            def products() -> tuple[jax.Array, jax.Array, jax.Array]:
                scores, visible = _scores(q, k, queries, keys)
                weights = jnp.where(visible, jnp.exp(scores - lse), 0.0)
                grad_weights = jnp.einsum("BSKGh,BTKh->BKGST", grad, v, preferred_element_type=jnp.float32)
                grad_scores = (weights * (grad_weights - delta) * scale).astype(k.dtype)
                return (
                    jnp.einsum("BKGST,BTKh->BSKGh", grad_scores, k, preferred_element_type=jnp.float32),
                    jnp.einsum("BKGST,BSKGh->BTKh", grad_scores, q, preferred_element_type=jnp.float32),
                    jnp.einsum(
                        "BKGST,BSKGh->BTKh", weights.astype(v.dtype), grad, preferred_element_type=jnp.float32
                    ),
                )

            def nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
                zeros = [jnp.zeros(a.shape, jnp.float32) for a in (q, k, v)]
                return zeros[0], zeros[1], zeros[2]

            add_q, add_k, add_v = jax.lax.cond(_meet(queries, keys), products, nothing)
            return (grad_q + add_q, grad_k_n.at[index].add(add_k), grad_v_n.at[index].add(add_v)), None

        start = (jnp.zeros(q.shape, jnp.float32), *carry)
        (grad_q, grad_k_n, grad_v_n), _ = jax.lax.scan(of_keys, start, jnp.arange(k_n.shape[0]))
        return (grad_k_n, grad_v_n), grad_q

    start = (jnp.zeros(k_n.shape, jnp.float32), jnp.zeros(v_n.shape, jnp.float32))
    (grad_k_n, grad_v_n), grad_q_n = jax.lax.scan(
        of_queries, start, (q_n, queries_n, lse_n, delta_n, grad_n.astype(v_BTKh.dtype))
    )
    return _whole(grad_q_n, s), _whole(grad_k_n, t), _whole(grad_v_n, t)


def _scores(
    q_BCKGh: jax.Array, k_BCKh: jax.Array, queries: Tokens, keys: Tokens
) -> tuple[jax.Array, jax.Array]:
    """Scaled scores float32 [B, K, G, C, C], and which of them count [B, 1, 1, C, C]."""
    scores = jnp.einsum("BSKGh,BTKh->BKGST", q_BCKGh, k_BCKh, preferred_element_type=jnp.float32)
    visible = (queries.segments[:, :, None] == keys.segments[:, None, :]) & (
        queries.index[:, None] >= keys.index[None, :]
    )
    return scores * q_BCKGh.shape[-1] ** -0.5, visible[:, None, None]


def _meet(queries: Tokens, keys: Tokens) -> jax.Array:
    """False only if no query may see any key."""
    low, high = queries.segments.min(-1), queries.segments.max(-1)
    overlap = (keys.segments.min(-1) <= high) & (keys.segments.max(-1) >= low)
    return overlap.any() & (keys.index.min() <= queries.index.max())


def _chunk_size(length: int) -> int:
    return min(CHUNK, length)


def _chunks(x_BSx: jax.Array, fill: int = 0) -> jax.Array:
    """[n, B, C, ...], the last chunk filled up."""
    b, s, *rest = x_BSx.shape
    size = _chunk_size(s)
    count = -(-s // size)
    padded = jnp.pad(x_BSx, ((0, 0), (0, count * size - s), *((0, 0) for _ in rest)), constant_values=fill)
    return jnp.moveaxis(padded.reshape(b, count, size, *rest), 1, 0)


def _token_chunks(tokens: Tokens, padding: int) -> Tokens:
    """Padding has its own segment and repeats the last index, so a chunk's largest index is unchanged."""
    size = _chunk_size(tokens.index.size)
    count = -(-tokens.index.size // size)
    index = jnp.pad(tokens.index, (0, count * size - tokens.index.size), mode="edge").reshape(count, size)
    return Tokens(index=index, segments=_chunks(tokens.segments, padding))


def _whole(x_nBCx: jax.Array, length: int) -> jax.Array:
    """[B, S, ...]: the inverse of `_chunks`."""
    x = jnp.moveaxis(x_nBCx, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
