"""Weighted negative log-likelihood of given tokens, with the gradient computed in the forward pass.

Where weights are known in advance, a chunk's gradient needs only its logits. Computed together with the loss,
it saves projecting every token a second time, which `token_logprobs` has to do. The idea is that of fused
linear cross entropies (Liger Kernel, arXiv 2410.10989, section 3.2).
"""

# N tokens, C tokens of a chunk, D model, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.losses.token_logprobs import (
    Ordered,
    Tokens,
    chunk_at,
    chunks_of,
    gradients,
    logits_of,
    softmax_of,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedNll:
    """Sums over tokens of weight times negative log-likelihood, and of weight times entropy in nats.

    The entropy has no gradient.
    """

    loss: Float[Array, ""]
    entropy: Float[Array, ""]


def weighted_nll(
    hidden_ND: Float[Array, "N D"],
    head_DV: Float[Array, "D V"],
    targets_N: Int[Array, " N"],
    weights_N: Float[Array, " N"],
    *,
    chunk: int = 1024,
) -> WeightedNll:
    """Sums over tokens of -weight * log softmax(hidden @ head)[target], statistics in float32.

    Tokens are projected once, `chunk` at a time, those of weight 0 not at all. Weights have no gradient.
    Otherwise as `token_logprobs` at temperature 1.
    """
    order = Ordered(weights_N != 0, chunk=min(chunk, hidden_ND.shape[0]))
    loss, entropy = _summed(
        order.chunk,
        head_DV.shape[1],
        order.tokens(hidden_ND, head_DV, targets_N, weights_N.astype(jnp.float32)),
    )
    return WeightedNll(loss, jax.lax.stop_gradient(entropy))


def _sums(chunk: int, vocabulary: int, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    def one(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = _chunk(index * chunk, chunk, vocabulary, tokens)
        return sums[0] + found.loss, sums[1] + found.entropy

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.fori_loop(0, chunks_of(tokens.count, chunk), one, (zero, zero))


@dataclass(frozen=True)
class _Chunk:
    """grad_CV: of the loss by the logits, in the dtype of the products."""

    loss: jax.Array
    entropy: jax.Array
    hidden_CD: jax.Array
    grad_CV: jax.Array


def _chunk(start: jax.Array, chunk: int, vocabulary: int, tokens: Tokens) -> _Chunk:
    hidden_ND, head_DV, targets_N, weights_N, _ = tokens
    hidden_CD, targets_C, weights_C = (chunk_at(x, start, chunk) for x in (hidden_ND, targets_N, weights_N))
    found = softmax_of(logits_of(hidden_CD, head_DV, vocabulary), targets_C)
    is_target_CV = jnp.arange(head_DV.shape[1])[None] == targets_C[:, None]
    share_C = weights_C / found.total_C
    grad_CV = found.raised_CV * share_C[:, None] - jnp.where(is_target_CV, weights_C[:, None], 0.0)
    return _Chunk(
        loss=jnp.where(weights_C != 0, -weights_C * found.logprobs_C, 0.0).sum(),
        entropy=jnp.where(weights_C != 0, weights_C * found.entropy_C, 0.0).sum(),
        hidden_CD=hidden_CD,
        grad_CV=grad_CV.astype(hidden_ND.dtype),
    )


def _forward(
    chunk: int, vocabulary: int, tokens: Tokens
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    hidden_ND, head_DV, targets_N, weights_N, count = tokens

    def one(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        loss, entropy, grad_hidden_ND, grad_head_DV = sums
        start = index * chunk
        found = _chunk(start, chunk, vocabulary, tokens)
        grad_CD = jnp.einsum("CV,DV->CD", found.grad_CV, head_DV).astype(hidden_ND.dtype)
        added_DV = jnp.einsum("CD,CV->DV", found.hidden_CD, found.grad_CV, preferred_element_type=jnp.float32)
        return (
            loss + found.loss,
            entropy + found.entropy,
            jax.lax.dynamic_update_slice_in_dim(grad_hidden_ND, grad_CD, start, axis=0),
            grad_head_DV + added_DV,
        )

    zero = jnp.zeros((), jnp.float32)
    empty = (zero, zero, jnp.zeros_like(hidden_ND), jnp.zeros(head_DV.shape, jnp.float32))
    loss, entropy, *grads = jax.lax.fori_loop(0, chunks_of(count, chunk), one, empty)
    return (loss, entropy), (*grads, head_DV[:0], targets_N, weights_N)


def _backward(
    chunk: int, vocabulary: int, residuals: tuple[jax.Array, ...], grads: tuple[jax.Array, jax.Array]
) -> tuple[Tokens]:
    grad_hidden_ND, grad_head_DV, head_0V, targets_N, weights_N = residuals
    grad_hidden_ND = (grads[0] * grad_hidden_ND).astype(grad_hidden_ND.dtype)
    grad_head_DV = (grads[0] * grad_head_DV).astype(head_0V.dtype)
    return (gradients(grad_hidden_ND, grad_head_DV, targets_N, weights_N),)


_summed = jax.custom_vjp(_sums, nondiff_argnums=(0, 1))
_summed.defvjp(_forward, _backward)
