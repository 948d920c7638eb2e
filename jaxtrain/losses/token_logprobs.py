"""Log-probability of given tokens without holding all logits [tokens, vocabulary] at once."""

# N tokens, C tokens of a chunk, D model, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

VOCABULARY_MULTIPLE = 64  # products of other widths ran three times slower


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """logprobs float32 [N] of the targets; entropy float32 [N] of the distributions, in nats.

    Both are 0 where a token is not counted. The entropy has no gradient.
    """

    logprobs: Float[Array, " N"]
    entropy: Float[Array, " N"]


def token_logprobs(
    hidden_ND: Float[Array, "N D"],
    head_DV: Float[Array, "D V"],
    targets_N: Int[Array, " N"],
    *,
    temperature_N: Float[Array, " N"] | None = None,
    counted_N: Bool[Array, " N"] | None = None,
    chunk: int = 1024,
) -> TokenLogprobs:
    """log softmax(hidden @ head / temperature)[target], statistics in float32.

    Tokens are projected `chunk` at a time and the backward pass recomputes each chunk's logits, so the
    largest temporary is [chunk, V]. `temperature_N` must be positive and has no gradient; None means 1.
    Tokens that are not counted (None: all are) are not projected: the counted ones are moved together and
    chunks without any are left out. A vocabulary that is no multiple of 64 is padded with columns of
    probability 0.
    """
    n = hidden_ND.shape[0]
    inverse_N = jnp.ones((n,), jnp.float32) if temperature_N is None else 1.0 / temperature_N
    counted_N = jnp.ones((n,), bool) if counted_N is None else counted_N
    order = Ordered(counted_N, chunk=min(chunk, n))
    found_2N = _chunked(order.chunk, head_DV.shape[1], order.tokens(hidden_ND, head_DV, targets_N, inverse_N))
    back_N = jnp.argsort(order.order_N)
    logprobs, entropy = jnp.where(counted_N, found_2N[:, :n][:, back_N], 0.0)
    return TokenLogprobs(logprobs, jax.lax.stop_gradient(entropy))


class Tokens(NamedTuple):
    """Tokens in whole chunks, of which the first `count` are used. scale_N: a number of each token."""

    hidden_ND: jax.Array
    head_DV: jax.Array
    targets_N: jax.Array
    scale_N: jax.Array
    count: jax.Array


def gradients(hidden_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array, scale_N: jax.Array) -> Tokens:
    """What a backward pass returns: the gradients of `hidden` and `head`, and none of the rest."""
    none, no_count = (np.zeros(shape, jax.dtypes.float0) for shape in (targets_N.shape, ()))
    return Tokens(hidden_ND, head_DV, none, jnp.zeros_like(scale_N), no_count)  # type: ignore[arg-type]


class Ordered:
    """Puts arrays of tokens into whole chunks, the `count` counted ones first."""

    def __init__(self, counted_N: jax.Array, *, chunk: int) -> None:
        self.chunk = chunk
        self.count = counted_N.sum()
        self.order_N = jnp.argsort(~counted_N, stable=True)

    def __call__(self, x_Nx: jax.Array) -> jax.Array:
        moved = jnp.take(x_Nx, self.order_N, axis=0, unique_indices=True)
        return jnp.pad(moved, ((0, -x_Nx.shape[0] % self.chunk), *((0, 0) for _ in x_Nx.shape[1:])))

    def tokens(
        self, hidden_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array, scale_N: jax.Array
    ) -> Tokens:
        """The head gets columns of zeros up to a multiple of `VOCABULARY_MULTIPLE`."""
        hidden_ND, dtype = self(hidden_ND), hidden_ND.dtype
        head_DV = jnp.pad(head_DV, ((0, 0), (0, -head_DV.shape[1] % VOCABULARY_MULTIPLE))).astype(dtype)
        return Tokens(hidden_ND, head_DV, self(targets_N), self(scale_N), self.count)


def _values(chunk: int, vocabulary: int, tokens: Tokens) -> jax.Array:
    """Log-probabilities and entropies [2, N] of the first `count` tokens; N is a multiple of `chunk`."""
    return _forward(chunk, vocabulary, tokens)[0]


def _forward(chunk: int, vocabulary: int, tokens: Tokens) -> tuple[jax.Array, tuple[Tokens, jax.Array]]:
    hidden_ND, head_DV, targets_N, inverse_N, count = tokens

    def one(index: jax.Array, out_3N: jax.Array) -> jax.Array:
        start = index * chunk
        logits_CV = logits_of(
            chunk_at(hidden_ND, start, chunk), head_DV, vocabulary, chunk_at(inverse_N, start, chunk)
        )
        found = softmax_of(logits_CV, chunk_at(targets_N, start, chunk))
        found_3C = jnp.stack([found.logprobs_C, found.entropy_C, found.normaliser_C])
        return jax.lax.dynamic_update_slice_in_dim(out_3N, found_3C, start, axis=1)

    empty = jnp.zeros((3, hidden_ND.shape[0]), jnp.float32)
    out_3N = jax.lax.fori_loop(0, chunks_of(count, chunk), one, empty)
    return out_3N[:2], (tokens, out_3N[2])


def _backward(
    chunk: int, vocabulary: int, residuals: tuple[Tokens, jax.Array], grad_2N: jax.Array
) -> tuple[Tokens]:
    (hidden_ND, head_DV, targets_N, inverse_N, count), normaliser_N = residuals
    grad_N = jnp.where(jnp.arange(hidden_ND.shape[0]) < count, grad_2N[0], 0.0) * inverse_N

    def one(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        grad_hidden_ND, grad_head_DV = sums
        start = index * chunk
        hidden_CD, targets_C = chunk_at(hidden_ND, start, chunk), chunk_at(targets_N, start, chunk)
        logits_CV = logits_of(hidden_CD, head_DV, vocabulary, chunk_at(inverse_N, start, chunk))
        probabilities_CV = jnp.exp(logits_CV - chunk_at(normaliser_N, start, chunk)[:, None])
        chosen_CV = jnp.arange(head_DV.shape[1])[None] == targets_C[:, None]
        grad_CV = (jnp.where(chosen_CV, 1.0, 0.0) - probabilities_CV) * chunk_at(grad_N, start, chunk)[
            :, None
        ]
        grad_CV = grad_CV.astype(hidden_ND.dtype)
        grad_hidden_CD = jnp.einsum("CV,DV->CD", grad_CV, head_DV).astype(hidden_ND.dtype)
        grad_hidden_ND = jax.lax.dynamic_update_slice_in_dim(grad_hidden_ND, grad_hidden_CD, start, axis=0)
        added_DV = jnp.einsum("CD,CV->DV", hidden_CD, grad_CV, preferred_element_type=jnp.float32)
        return grad_hidden_ND, grad_head_DV + added_DV

    zeros = (jnp.zeros_like(hidden_ND), jnp.zeros(head_DV.shape, jnp.float32))
    grad_hidden_ND, grad_head_DV = jax.lax.fori_loop(0, chunks_of(count, chunk), one, zeros)
    return (gradients(grad_hidden_ND, grad_head_DV.astype(head_DV.dtype), targets_N, inverse_N),)


_chunked = jax.custom_vjp(_values, nondiff_argnums=(0, 1))
_chunked.defvjp(_forward, _backward)


def logits_of(
    hidden_CD: jax.Array, head_DV: jax.Array, vocabulary: int, inverse_C: jax.Array | None = None
) -> jax.Array:
    """float32 [C, V] times `inverse`; minus infinity in columns past the vocabulary."""
    logits_CV = jnp.matmul(hidden_CD, head_DV, preferred_element_type=jnp.float32)
    if inverse_C is not None:
        logits_CV = logits_CV * inverse_C[:, None]
    if vocabulary == head_DV.shape[1]:
        return logits_CV
    return jnp.where(jnp.arange(head_DV.shape[1]) < vocabulary, logits_CV, -jnp.inf)


@dataclass(frozen=True)
class Softmax:
    """raised / total: probabilities. logprobs: of the targets. normaliser: log of the sum of exponentials."""

    raised_CV: jax.Array
    total_C: jax.Array
    logprobs_C: jax.Array
    entropy_C: jax.Array
    normaliser_C: jax.Array


def softmax_of(logits_CV: jax.Array, targets_C: jax.Array) -> Softmax:
    """Logits may be minus infinity, except those of the targets."""
    largest_C = logits_CV.max(axis=-1)
    raised_CV = jnp.exp(logits_CV - largest_C[:, None])
    total_C = raised_CV.sum(-1)
    normaliser_C = largest_C + jnp.log(total_C)
    mean_C = (raised_CV * jnp.maximum(logits_CV, jnp.finfo(jnp.float32).min)).sum(-1) / total_C
    chosen_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)[:, 0]
    return Softmax(raised_CV, total_C, chosen_C - normaliser_C, normaliser_C - mean_C, normaliser_C)


def chunks_of(count: jax.Array, chunk: int) -> jax.Array:
    return -(-count // chunk)


def chunk_at(x_Nx: jax.Array, start: jax.Array, chunk: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_Nx, start, chunk, axis=0)
