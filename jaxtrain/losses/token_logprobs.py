"""Log-probability of given tokens without ever holding logits [tokens, vocabulary] whole."""

# N tokens, C tokens of a chunk, D model, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """logprobs float32 [N] of the targets; entropy float32 [N] of the distributions, in nats."""

    logprobs: jax.Array
    entropy: jax.Array


def token_logprobs(
    hidden_ND: jax.Array,
    head_DV: jax.Array,
    targets_N: jax.Array,
    *,
    temperature_N: jax.Array | None = None,
    chunk: int = 1024,
) -> TokenLogprobs:
    """log softmax(hidden @ head / temperature)[target], statistics in float32.

    Tokens are projected `chunk` at a time and the backward pass recomputes each chunk's logits, so the
    largest temporary is [chunk, V]. `temperature_N` must be positive; None means 1.
    """
    n, d = hidden_ND.shape
    chunk = min(chunk, n)
    count = -(-n // chunk)
    padding = count * chunk - n
    temperature_N = jnp.ones((n,), jnp.float32) if temperature_N is None else temperature_N
    hidden = jnp.pad(hidden_ND, ((0, padding), (0, 0))).reshape(count, chunk, d)
    targets = jnp.pad(targets_N, (0, padding)).reshape(count, chunk)
    temperature = jnp.pad(temperature_N, (0, padding), constant_values=1.0).reshape(count, chunk)
    head = head_DV.astype(hidden_ND.dtype)

    @jax.checkpoint
    def one(_: None, chunk_inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, TokenLogprobs]:
        hidden_CD, targets_C, temperature_C = chunk_inputs
        logits_CV = jnp.matmul(hidden_CD, head, preferred_element_type=jnp.float32) / temperature_C[:, None]
        normaliser_C = jax.nn.logsumexp(logits_CV, axis=-1)
        chosen_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)[:, 0]
        probabilities_CV = jnp.exp(logits_CV - normaliser_C[:, None])
        entropy_C = normaliser_C - (probabilities_CV * logits_CV).sum(-1)
        return None, TokenLogprobs(chosen_C - normaliser_C, jax.lax.stop_gradient(entropy_C))

    _, out = jax.lax.scan(one, None, (hidden, targets, temperature))
    return jax.tree.map(lambda x: x.reshape(-1)[:n], out)
