"""QK-clip: a head's logits come down to the threshold, and nothing else moves."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.next_token import NextToken
from jaxtrain.models import attention_logits
from jaxtrain.models.attention_logits import max_logits
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define, initialize
from jaxtrain.optim.optimizer import OptimizerConfig
from jaxtrain.optim.qk_clip import QkClip, head_factors
from jaxtrain.training.build import trainable
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.programs import train_step
from sharding.mesh import MeshSpec
from tests.jaxtrain.models.tiny import HF_CONFIG

# 4 query heads on 2 key heads, with biases and without QK-norm; 1 dense and 1 MoE layer.
MODEL = dataclasses.replace(
    ModelConfig.from_hf(
        HF_CONFIG | {"use_qk_norm": False, "attention_bias": True, "num_hidden_layers": 2},
        compute_dtype="float32",
    ),
    measure_max_logits=True,
)
DEFINITION = define(MODEL)
STACKS = (("dense", MODEL.first_k_dense_replace), ("moe", MODEL.num_moe_layers))


@jax.jit
def logits_of(params, tokens, positions, segment_ids):
    return DEFINITION.bind(params)(tokens, positions, segment_ids)[1].max_logits


def test_factors_by_hand():
    """Threshold 100. Own key head: roots of the factor (arXiv 2507.20534). Shared: the mildest one's root."""
    query, key = head_factors(jnp.asarray([[400.0, 50.0]]), 100.0, key_heads=2)
    np.testing.assert_allclose(query, [[0.5, 1.0]])
    np.testing.assert_allclose(key, [[0.5, 1.0]])
    query, key = head_factors(jnp.asarray([[1600.0, 400.0, 400.0, 50.0]]), 100.0, key_heads=2)
    np.testing.assert_allclose(key, [[0.5, 1.0]])
    np.testing.assert_allclose(query, [[1 / 8, 0.5, 0.25, 1.0]])
    none = jnp.full((1, 4), jnp.finfo(jnp.float32).min)
    np.testing.assert_array_equal(head_factors(none, 100.0, key_heads=4)[0], 1.0)


def test_largest_logit_is_over_the_pairs_that_attention_sees(monkeypatch):
    """Oracle: a loop over pairs. Chunks of 4 of 10 queries; two documents and padding."""
    monkeypatch.setattr(attention_logits, "_CHUNK", 4)
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 10, 4, 8)), rng.normal(size=(2, 10, 2, 8))
    segments = np.array([[1] * 6 + [2] * 4, [1] * 7 + [0] * 3])
    expected = np.full(4, -np.inf)
    for row, head, i in np.ndindex(2, 4, 10):
        for j in range(i + 1):
            if segments[row, i] == segments[row, j] > 0:
                logit = q[row, i, head] @ k[row, j, head // 2] / 8**0.5
                expected[head] = max(expected[head], logit)
    found = max_logits(jnp.float32(q), jnp.float32(k), jnp.asarray(segments))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    monkeypatch.setattr(attention_logits, "_CHUNK", 1024)
    whole = max_logits(jnp.float32(q), jnp.float32(k), jnp.asarray(segments))
    np.testing.assert_allclose(whole, expected, rtol=1e-5)


def test_clipped_heads_of_the_first_layer_reach_the_threshold_and_the_others_stay():
    params = initialize(MODEL, seed=0)
    rng = np.random.default_rng(0)
    for path in params:
        if path.endswith(("q_proj/kernel", "k_proj/kernel")):
            params[path] *= 10.0
        if path.endswith(("q_proj/bias", "k_proj/bias")):
            params[path] = jnp.asarray(rng.normal(size=params[path].shape) * 0.1, jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 128, (2, 32)), jnp.int32)
    batch = tokens, jnp.tile(jnp.arange(32, dtype=jnp.int32), (2, 1)), jnp.ones((2, 32), jnp.int32)
    before = logits_of(params, *batch)
    assert before.shape == (2, 4)
    threshold = float(jnp.sort(before[0])[1]) + 1e-3  # the two smaller of four heads are below
    assert threshold > 0
    clip = QkClip(threshold=threshold, key_heads=2, stacks=STACKS)
    clipped = clip.apply(params, before)
    after = logits_of(clipped, *batch)
    np.testing.assert_allclose(after[0], jnp.minimum(before[0], threshold), rtol=1e-4)
    changed = {path for path, value in clipped.items() if (value != params[path]).any()}
    assert changed <= {
        f"{s}/attention/{n}/{x}" for s, _ in STACKS for n in ("q_proj", "k_proj") for x in ("kernel", "bias")
    }


def test_a_step_clips_by_the_logits_of_its_whole_batch():
    """Two microbatches on two devices, in steps of learning rate 0."""
    mesh = MeshSpec(ici={"fsdp": 2}).build(jax.devices()[:2])
    built = trainable(
        dataclasses.replace(MODEL, measure_max_logits=False),
        mesh,
        OptimizerConfig(),
        clip_norm=1.0,
        qk_clip=1e-3,
    )
    assert built.definition == DEFINITION  # it measures what it clips
    programs = built.programs(NextToken(), rows=2, sequence_length=32)
    rng = np.random.default_rng(0)
    documents = [
        Document(tokens=rng.integers(0, 128, 16).astype(np.int32), loss_weights=np.ones(16, np.float32))
        for _ in range(8)
    ]
    batch = pack(documents, rows=2, sequence_length=32)
    state = built.initial_state(seed=0)
    first, second = (
        logits_of(jax.device_get({**state.params, **state.buffers}), b.tokens, b.positions, b.segment_ids)
        for b in batch.microbatches()
    )
    clip = QkClip(threshold=1e-3, key_heads=2, stacks=STACKS)
    expected = clip.apply(jax.device_get(state.params), jnp.maximum(first, second))
    still = ScheduledValues(learning_rate=0.0, router_bias_rate=0.0, balance_weight=0.0, mtp_weight=0.0)
    stepped, report = train_step(programs, built.placement, state, batch, still)
    assert report.values["max_logit"] == pytest.approx(float(jnp.maximum(first, second).max()), rel=1e-5)
    for path, value in stepped.params.items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-7)
    assert not np.allclose(stepped.params["moe/attention/q_proj/kernel"], 0.0)


def test_what_is_off_is_not_there():
    definition = define(dataclasses.replace(MODEL, measure_max_logits=False))
    out = jax.eval_shape(
        lambda p: definition.bind(p)(*(jnp.ones((1, 4), jnp.int32),) * 3)[1], definition.shapes
    )
    assert out.max_logits is None
