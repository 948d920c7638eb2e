"""The decoder against itself: with a cache, padded, with other expert implementations, and on a mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.decoder import Cache
from jaxtrain.models.definition import define, initialize
from jaxtrain.models.sharding_rules import parameter_shardings, row_sharding
from sharding.mesh import MeshSpec
from tests.jaxtrain.models.forward import CONFIG, forward, perturbed_parameters, tokens_of
from tests.jaxtrain.models.tiny import HF_CONFIG


@pytest.fixture(scope="module")
def params() -> dict[str, jax.Array]:
    return perturbed_parameters(seed=0)


def test_the_cache_continues_what_the_full_pass_computes(params):
    """Prefill of 9 tokens, 3 at once, then one by one equals one pass; rows may be at different positions."""
    tokens = tokens_of(np.random.default_rng(2), 2, 14)
    expected, _ = forward(params, tokens)
    definition = define(CONFIG)

    @jax.jit
    def extend(tokens, positions, cache):
        model = definition.bind(params)
        hidden, cache, experts = model.extend(tokens, positions, cache)
        return model.logits(hidden), cache, experts

    shape = (CONFIG.num_hidden_layers, 2, 20, CONFIG.num_key_value_heads, CONFIG.head_dim)
    cache = Cache(jnp.zeros(shape), jnp.zeros(shape))
    starts = [(0, 9), (9, 12), (12, 13), (13, 14)]
    for start, stop in starts:
        positions = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        logits, cache, experts = extend(jnp.asarray(tokens[:, start:stop]), positions, cache)
        np.testing.assert_allclose(logits, expected[:, start:stop], atol=2e-4)
        assert experts.shape == (2, stop - start, CONFIG.num_moe_layers, CONFIG.num_experts_per_tok)


def test_padding_is_not_counted_in_router_statistics(params):
    tokens = tokens_of(np.random.default_rng(4), 2, 10)
    segments = np.array([[1] * 10, [1] * 4 + [0] * 6], np.int32)
    _, statistics = forward(params, tokens, segment_ids=segments)
    per_layer = 14 * HF_CONFIG["num_experts_per_tok"]
    np.testing.assert_array_equal(statistics.counts.sum(-1), [per_layer, per_layer])


@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@pytest.mark.parametrize("one_expert", [False, True])
def test_expert_implementations_equal_the_dense_reference(params, implementation, one_expert):
    """Values and gradients, also when every token chooses the same experts."""
    tokens = jnp.asarray(tokens_of(np.random.default_rng(5), 4, 32))
    positions = jnp.broadcast_to(jnp.arange(32), (4, 32))
    params = dict(params)
    if one_expert:
        bias = jnp.zeros((2, 8)).at[:, 3].set(100.0).at[:, 5].set(90.0)
        params["moe/mlp/router/correction_bias"] = bias

    def loss(params, config):
        hidden, statistics = define(config).bind(params)(tokens, positions, jnp.ones((4, 32), jnp.int32))
        return (hidden * jnp.cos(jnp.arange(64))).sum(), statistics.counts

    def run(name):
        config = dataclasses.replace(CONFIG, expert_implementation=name)
        return jax.jit(jax.value_and_grad(lambda p: loss(p, config), has_aux=True))(params)

    from jaxtrain.models.config import ExpertImplementation

    (expected, counts), expected_gradients = run(ExpertImplementation.DENSE)
    (found, _), gradients = run(ExpertImplementation(implementation))
    if one_expert:
        assert counts[0, 3] == counts[0, 5] == 128
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for path, expected_gradient in expected_gradients.items():
        scale = np.abs(expected_gradient).max() + 1e-6
        assert np.abs(gradients[path] - expected_gradient).max() <= 2e-5 * scale, path


@pytest.mark.parametrize("axes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "expert": 4}])
def test_a_mesh_gives_the_single_device_result(params, axes):
    tokens = tokens_of(np.random.default_rng(6), 8, 12)
    expected, statistics = forward(params, tokens)
    mesh = MeshSpec(ici=axes).build()
    definition = define(CONFIG)
    shardings = parameter_shardings(definition, mesh)
    placed = {path: jax.device_put(value, shardings[path]) for path, value in params.items()}
    assert any(not s.is_fully_replicated for s in shardings.values())
    rows = row_sharding(mesh)

    @jax.jit
    def run(params, tokens):
        model = definition.bind(params)
        positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
        hidden, statistics = model(tokens, positions, jnp.ones(tokens.shape, jnp.int32))
        return model.logits(hidden), statistics

    logits, found = run(placed, jax.device_put(tokens, rows))
    np.testing.assert_allclose(logits, expected, atol=1e-3 * float(np.abs(expected).max()))
    np.testing.assert_array_equal(found.counts, statistics.counts)


def test_initial_parameters_do_not_depend_on_the_mesh():
    mesh = MeshSpec(ici={"fsdp": 4, "expert": 2}).build()
    one = initialize(CONFIG, seed=3)
    many = initialize(CONFIG, seed=3, shardings=parameter_shardings(define(CONFIG), mesh))
    for path, value in one.items():
        np.testing.assert_array_equal(value, many[path], err_msg=path)
