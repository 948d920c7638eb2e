"""Router replay: which ids are kept, by hand and as laws, and that gate values stay the trainer's own."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.definition import define
from jaxtrain.models.replay import CHOOSE, choose, plausible
from tests.jaxtrain.models.forward import CONFIG, perturbed_parameters, tokens_of

SMALL = dataclasses.replace(CONFIG, num_hidden_layers=2, first_k_dense_replace=0)
SCORES = jnp.array([[0.9, 0.8, 0.5, 0.39, 0.1]])


@pytest.mark.parametrize(
    ("replay", "chosen"),
    [
        ([0, 1], [0, 1]),  # its own choice
        ([CHOOSE, CHOOSE], [0, 1]),
        ([2, 0], [0, 2]),  # 0.5 >= 0.5 * 0.8
        ([3, 2], [0, 2]),  # 0.39 is below: the router's best takes its place
        ([4, 3], [0, 1]),  # neither is plausible
        ([2, CHOOSE], [0, 2]),  # the rest is the router's best
        ([2, 2], [0, 2]),  # an expert is used once
        ([7, -5], [0, 1]),  # ids of nobody
    ],
)
def test_two_of_five_by_hand(replay: list[int], chosen: list[int]):
    """Own top-2 is {0, 1}, its least gate 0.8, so with threshold 0.5 gates from 0.4 on are plausible."""
    ids = choose(SCORES, SCORES, jnp.array([replay]), threshold=0.5)
    assert ids.tolist() == [chosen]


def test_the_threshold_is_of_gates_and_the_filling_of_choices():
    """A bias makes 4 the first choice: its gate, 0.1, is then the least, and every replayed id plausible."""
    choice = SCORES + jnp.array([0.0, 0.0, 0.0, 0.0, 2.0])
    assert choose(choice, SCORES, jnp.array([[3, CHOOSE]]), threshold=1.0).tolist() == [[4, 3]]
    own = jnp.array([[4, 0]])
    kept = plausible(SCORES, own, jnp.array([[3, 2]]), threshold=3.95)
    assert kept.tolist() == [[False, False, True, False, False]]


@pytest.fixture(scope="module")
def run():
    """(ids or None, threshold) -> hidden states, router statistics with experts, gradients."""
    params = perturbed_parameters(seed=0, config=SMALL)
    tokens = jnp.asarray(tokens_of(np.random.default_rng(5), 2, 16))
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))

    @partial(jax.jit, static_argnums=1)
    def value(params, config, replay):
        def loss(params):
            hidden, router = define(config).bind(params)(
                tokens, positions, jnp.ones((2, 16), jnp.int32), replay_BSLk=replay, return_experts=True
            )
            return (hidden * jnp.cos(jnp.arange(64.0))).sum(), (hidden, router)

        return jax.value_and_grad(loss, has_aux=True)(params)

    def run(replay, threshold=0.5):
        (_, (hidden, router)), gradients = value(
            params, dataclasses.replace(SMALL, replay_threshold=threshold), replay
        )
        return hidden, router, gradients

    return run


def test_what_the_router_chose_replays_to_the_same_bits(run):
    hidden, router, gradients = run(None)
    assert router.experts.shape == (2, 16, SMALL.num_moe_layers, SMALL.num_experts_per_tok)
    for ids in (router.experts, jnp.full_like(router.experts, CHOOSE), router.experts[..., ::-1]):
        again, same, same_gradients = run(ids)
        np.testing.assert_array_equal(again, hidden)
        np.testing.assert_array_equal(same.experts, router.experts)
        np.testing.assert_array_equal(same.counts, router.counts)
        for path, gradient in gradients.items():
            np.testing.assert_array_equal(same_gradients[path], gradient, err_msg=path)


def test_other_experts_are_used_and_their_router_learns(run):
    hidden, router, _ = run(None)
    shifted = (router.experts + 1) % SMALL.n_routed_experts
    forced, used, gradients = run(shifted, threshold=0.0)
    np.testing.assert_array_equal(np.sort(used.experts), np.sort(shifted))
    assert np.abs(forced - hidden).max() > 1e-2
    assert np.abs(gradients["moe/mlp/router/kernel"]).max() > 0
