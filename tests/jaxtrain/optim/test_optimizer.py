"""The optimizer: which parameter goes where by path, and updates at learning rate 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.optim.muon import MuonConfig
from jaxtrain.optim.optimizer import AdamWConfig, Method, OptimizerConfig, build, select

# A GLM-4.5 in small: 2 dense and 3 MoE layers, hidden 8, 4 heads of 4, 2 KV heads, 5 experts; float32
# structs.
SHAPES = {
    "embedding": (32, 8),
    "final_norm": (8,),
    "lm_head/kernel": (8, 32),
    "dense/input_norm": (2, 8),
    "dense/attention/q_proj/kernel": (2, 8, 16),
    "dense/attention/q_proj/bias": (2, 16),
    "dense/attention/q_norm": (2, 4),
    "dense/attention/v_proj/kernel": (2, 8, 8),
    "dense/attention/o_proj/kernel": (2, 16, 8),
    "dense/mlp/down_proj/kernel": (2, 12, 8),
    "moe/post_attention_norm": (3, 8),
    "moe/mlp/router/kernel": (3, 8, 5),
    "moe/mlp/router/correction_bias": (3, 5),
    "moe/mlp/experts/gate_proj": (3, 5, 8, 6),
    "moe/mlp/shared/up_proj/kernel": (3, 8, 6),
    "mtp/enorm": (1, 8),
    "mtp/eh_proj/kernel": (1, 16, 8),
}
STRUCTS = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()}
ADAMW = {
    "embedding",
    "final_norm",
    "dense/input_norm",
    "dense/attention/q_proj/bias",
    "dense/attention/q_norm",
    "moe/post_attention_norm",
    "mtp/enorm",
}


def _values(seed, paths=SHAPES):
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.normal(size=SHAPES[path]), jnp.float32) for path in paths}


def test_glm45_rule():
    """arXiv 2508.06471: Muon for all parameters except word embedding, biases and RMSNorm weights."""
    choices = select(OptimizerConfig(), STRUCTS)
    assert {path for path, choice in choices.items() if choice.method is Method.adamw} == ADAMW
    assert choices["moe/mlp/router/correction_bias"].method is Method.frozen
    assert all(
        c.method is Method.muon for p, c in choices.items() if p not in ADAMW and "correction" not in p
    )
    assert (choices["moe/mlp/experts/gate_proj"].matrices, choices["moe/mlp/experts/gate_proj"].matrix) == (
        15,
        (8, 6),
    )
    assert choices["dense/attention/q_proj/bias"].reason == "bias"
    decayed = {path for path, choice in choices.items() if choice.weight_decay}
    assert decayed == set(SHAPES) - ADAMW - {"moe/mlp/router/correction_bias"} | {"embedding"}


def test_options_and_overrides():
    config = OptimizerConfig(
        lm_head=Method.adamw, overrides={"*/router/kernel": Method.adamw, "mtp/*": Method.frozen}
    )
    choices = select(config, STRUCTS)
    assert choices["lm_head/kernel"].method is Method.adamw
    assert choices["moe/mlp/router/kernel"].reason == "override */router/kernel"
    assert choices["moe/mlp/router/kernel"].weight_decay == 0.1
    assert choices["mtp/enorm"].method is Method.frozen
    everything = select(OptimizerConfig(matrices=Method.adamw, lm_head=Method.adamw), STRUCTS)
    assert {choice.method for choice in everything.values()} == {Method.adamw, Method.frozen}
    heads = select(OptimizerConfig(muon=MuonConfig(split_heads=4)), STRUCTS)
    assert (
        heads["dense/attention/q_proj/kernel"].matrices,
        heads["dense/attention/q_proj/kernel"].matrix,
    ) == (8, (8, 4))
    assert heads["dense/attention/o_proj/kernel"].matrix == (16, 8)


def test_an_unknown_path_and_a_vector_for_muon_are_refused():
    with pytest.raises(ValueError, match=r"moe/scale: no rule says .* add it to optimizer.overrides"):
        select(OptimizerConfig(), {"moe/scale": jax.ShapeDtypeStruct((4, 4), jnp.float32)})
    assert select(OptimizerConfig(overrides={"*/scale": Method.adamw}), {"moe/scale": STRUCTS["final_norm"]})
    with pytest.raises(ValueError, match=r"optimizer.overrides: '\*/routr' matches no parameter"):
        select(OptimizerConfig(overrides={"*/routr": Method.adamw}), STRUCTS)
    with pytest.raises(ValueError, match=r"final_norm: shape \(8,\) has no matrix for Muon"):
        select(OptimizerConfig(overrides={"final_norm": Method.muon}), STRUCTS)


def test_excepted_parameters_get_adamw_of_optax_at_learning_rate_1():
    config = OptimizerConfig(adamw=AdamWConfig(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1))
    some, paths = _values(0, ADAMW), [*ADAMW, "moe/mlp/router/correction_bias"]
    params = some | _values(0, paths[-1:])
    optimizer = build(config, params)
    reference = optax.adamw(
        1.0,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        mask=lambda tree: {p: p == "embedding" for p in tree},
    )
    state, reference_state = optimizer.init(params), reference.init(some)
    update = jax.jit(optimizer.update)
    for step in range(3):
        gradients = _values(step + 1, paths)
        updates, state = update(gradients, state, params)
        expected, reference_state = reference.update({p: gradients[p] for p in ADAMW}, reference_state, some)
        for path in ADAMW:
            np.testing.assert_allclose(updates[path], expected[path], rtol=1e-5, atol=1e-6)
        assert not updates["moe/mlp/router/correction_bias"].any()


def test_muon_parameters_get_optax_muon_at_learning_rate_1_with_decay():
    """In the first step optax's bias correction only scales what is orthogonalised, which changes nothing."""
    path = "moe/mlp/experts/gate_proj"
    params, gradients = _values(0, [path]), _values(1, [path])
    dimensions = {path: optax.contrib.MuonDimensionNumbers(2, 3)}
    reference = optax.contrib.muon(
        1.0, consistent_rms=0.2, weight_decay=0.1, muon_weight_dimension_numbers=lambda _: dimensions
    )
    expected, _ = reference.update(gradients, reference.init(params), params)
    optimizer = build(OptimizerConfig(), {path: STRUCTS[path]})
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates[path], expected[path], atol=1e-4)


def test_state_is_flat_by_path_and_updates_keep_the_gradients_dtype():
    optimizer = build(OptimizerConfig(muon=MuonConfig(momentum_dtype="bfloat16")), STRUCTS)
    state = jax.eval_shape(optimizer.init, STRUCTS)
    assert set(state.adamw.mu) == ADAMW
    assert set(state.muon.momentum) == set(SHAPES) - ADAMW - {"moe/mlp/router/correction_bias"}
    assert {leaf.dtype.name for leaf in state.muon.momentum.values()} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in state.adamw.nu.values()} == {"float32"}
    gradients = {path: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for path, shape in SHAPES.items()}
    updates, new_state = jax.eval_shape(optimizer.update, gradients, state, STRUCTS)
    assert {leaf.dtype.name for leaf in updates.values()} == {"bfloat16"}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    with pytest.raises(ValueError, match="params is None"):
        optimizer.update(gradients, state)
