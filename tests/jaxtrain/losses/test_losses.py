"""Log-probabilities of targets against the plain formula, and the memory they take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.losses.token_logprobs import token_logprobs
from jaxtrain.losses.weighted_nll import weighted_nll


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_change_neither_value_nor_gradient(chunk):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(13, 8)), rng.normal(size=(8, 21))
    targets, temperature = rng.integers(0, 21, 13), rng.uniform(0.5, 2.0, 13)

    def plain(hidden, head):
        logits = hidden @ head / temperature[:, None]
        logprobs = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
        return logprobs[np.arange(13), targets], entropy

    def chunked(hidden, head):
        out = token_logprobs(
            hidden, head, jnp.asarray(targets), temperature_N=jnp.asarray(temperature), chunk=chunk
        )
        return out.logprobs, out.entropy

    args = (jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32))
    for found, expected in zip(chunked(*args), plain(*args), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    weights = jnp.arange(13.0)
    grads = [
        jax.grad(lambda h, w, f=f: (f(h, w)[0] * weights).sum(), argnums=(0, 1))(*args)
        for f in (chunked, plain)
    ]
    for found, expected in zip(*grads, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_weighted_sum_has_value_and_gradient_of_the_plain_formula(chunk):
    """Times a cotangent that is not 1, a vocabulary that is padded, weights of both signs and 0."""
    rng = np.random.default_rng(2)
    hidden, head = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((13, 8), (8, 21)))
    targets, weights = jnp.asarray(rng.integers(0, 21, 13)), jnp.asarray(np.arange(13.0) % 4 - 1)

    def plain(hidden, head):
        logprobs = jax.nn.log_softmax(hidden @ head)
        entropy = -(jnp.exp(logprobs) * logprobs).sum(-1) @ weights
        return -3 * logprobs[jnp.arange(13), targets] @ weights, entropy

    def chunked(hidden, head):
        out = weighted_nll(hidden, head, targets, weights, chunk=chunk)
        return 3 * out.loss, out.entropy

    expected, found = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(hidden, head) for f in (plain, chunked)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(chunked(hidden, head), plain(hidden, head), rtol=1e-5)  # without a gradient
    # Tokens of weight 0 in chunks of their own are not read.
    unread = jnp.where(weights[:, None] == 0, jnp.inf, hidden)
    assert np.isfinite(jnp.stack(chunked(unread, head))).all()


def test_tokens_that_are_not_counted_are_neither_computed_nor_trained():
    """As the plain formula with their weights at 0; their own hidden state may even be infinite."""
    rng = np.random.default_rng(1)
    hidden, head = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((13, 8), (8, 70)))
    targets, counted = jnp.asarray(rng.integers(0, 70, 13)), jnp.asarray(np.arange(13) % 3 == 1)

    def plain(hidden, head):
        return (jax.nn.log_softmax(hidden @ head)[jnp.arange(13), targets] * counted).sum()

    def chunked(hidden, head):
        return token_logprobs(hidden, head, targets, counted_N=counted, chunk=3).logprobs.sum()

    expected = jax.value_and_grad(plain, argnums=(0, 1))(hidden, head)
    ignored = jnp.where(counted[:, None], hidden, jnp.inf).at[12].set(hidden[12])  # 12 fills the last chunk
    found = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(hidden, head)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert np.isfinite(chunked(ignored, head))


@pytest.mark.parametrize("sums", [False, True])
def test_peak_memory_grows_with_the_vocabulary_by_one_chunk_of_logits(sums):
    """Temporaries of value and gradient, apart from the head itself and its gradient, at two vocabularies."""
    tokens, width, chunk = 8192, 16, 128

    def temporaries(vocabulary: int) -> int:
        hidden = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
        head = jax.ShapeDtypeStruct((width, vocabulary), jnp.float32)
        targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

        def loss(hidden, head, targets):
            if sums:
                return weighted_nll(hidden, head, targets, jnp.ones(tokens), chunk=chunk).loss
            return token_logprobs(hidden, head, targets, chunk=chunk).logprobs.sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes - 2 * 4 * width * vocabulary

    growth = temporaries(16384) - temporaries(4096)
    one_chunk = 4 * chunk * (16384 - 4096)
    assert growth < 3 * one_chunk  # logits and their gradient, of 64 such chunks


def test_peak_memory_does_not_hold_all_logits():
    """Temporaries of value and gradient stay below [tokens, vocabulary] float32."""
    tokens, width, vocabulary = 4096, 16, 8192
    hidden = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    head = jax.ShapeDtypeStruct((width, vocabulary), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(hidden, head, targets):
        return token_logprobs(hidden, head, targets, chunk=256).logprobs.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head, targets).compile()
    all_logits = 4 * tokens * vocabulary
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits / 3
