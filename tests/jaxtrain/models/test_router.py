"""Balancing against hand calculation."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models.balance import sequence_balance
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.parameters import Buffer
from jaxtrain.models.router import Router, Routing, correction_bias_update, expert_counts
from tests.jaxtrain.models.tiny import HF_CONFIG


def test_bias_moves_against_the_load():
    counts = jnp.array([[10.0, 2.0, 4.0, 0.0]])  # mean 4
    np.testing.assert_allclose(correction_bias_update(counts, rate=0.1), [[-0.1, 0.1, 0.0, 0.1]])


def test_no_platform_rounds_the_factors_of_the_routers_product():
    """Forward and backward, though the activations be BF16: TPUs and GPUs would by default."""
    config = ModelConfig.from_hf(HF_CONFIG, compute_dtype="bfloat16")

    def scores(x_ND):
        graph, stacked = nnx.split(Router(nnx.Rngs(0), config, layers=1))
        return nnx.merge(graph, jax.tree.map(lambda value: value[0], stacked))(x_ND).scores.sum()

    program = str(jax.make_jaxpr(jax.grad(scores))(jnp.ones((3, config.hidden_size), jnp.bfloat16)))
    products = program.count("dot_general[")
    assert products >= 2
    assert program.count("Precision.HIGHEST, Precision.HIGHEST") == products


def test_a_correction_bias_chooses_and_does_not_weigh():
    """Scores 3/4 and 1/2 of two experts: biases of 0 and 0.4 choose the second, and its gate is 2.5 * 1/2."""
    config = replace(
        ModelConfig.from_hf(HF_CONFIG | {"hidden_size": 1, "n_routed_experts": 2, "num_experts_per_tok": 1}),
        norm_topk_prob=False,
    )
    router = Router(nnx.Rngs(0), config, layers=1)
    graph, _ = nnx.split(router)
    state = {"kernel": jnp.array([[np.log(3.0), 0.0]]), "correction_bias": jnp.array([0.0, 0.4])}
    flat = {(name,): (Buffer if "bias" in name else nnx.Param)(value) for name, value in state.items()}
    routing = nnx.merge(graph, nnx.from_flat_state(flat))(jnp.ones((1, 1)))
    np.testing.assert_allclose(routing.scores, [[0.75, 0.5]], rtol=1e-6)
    assert routing.ids.tolist() == [[1]]
    np.testing.assert_allclose(routing.weights, [[2.5 * 0.5]], rtol=1e-6)


def test_counts_skip_invalid_tokens():
    ids = jnp.array([[0, 1], [1, 2], [3, 0]])
    valid = jnp.array([True, True, False])
    np.testing.assert_array_equal(expert_counts(ids, valid, num_experts=4), [1, 2, 1, 0])


def test_sequence_balance_by_hand():
    """One row of 2 valid tokens, 4 experts, top-2: f = (E/k) * counts / tokens, P = mean normalised score."""
    config = ModelConfig.from_hf({**HF_CONFIG, "n_routed_experts": 4})
    scores = jnp.array([[0.4, 0.2, 0.2, 0.2], [0.1, 0.1, 0.4, 0.4], [0.9, 0.9, 0.0, 0.0]])
    routing = Routing(ids=jnp.array([[0, 1], [2, 0], [0, 1]]), weights=jnp.zeros((3, 2)), scores=scores)
    segments = jnp.array([[1, 1, 0]])
    f = np.array([2, 1, 1, 0]) * (4 / 2) / 2
    p = np.array([0.25, 0.15, 0.3, 0.3])
    np.testing.assert_allclose(sequence_balance(routing, segments, config), 2 * (f @ p), rtol=1e-6)
