"""A batch in microbatches is one big batch, and what is not finite changes nothing."""

from __future__ import annotations

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.batch import STANDARD, Batch
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.next_token import NextToken
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.optim.noise_scale import estimate
from jaxtrain.optim.optimizer import OptimizerConfig
from jaxtrain.training.build import trainable
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.programs import host_values, train_step
from jaxtrain.training.step import LossScales, StepMetrics
from sharding.mesh import MeshSpec
from sharding.tree import shard
from tests.jaxtrain.models.tiny import HF_CONFIG

MODEL = ModelConfig.from_hf(HF_CONFIG, compute_dtype="float32")
DEFINITION = define(MODEL)
BIAS = "moe/mlp/router/correction_bias"


def documents(count: int) -> list[Document]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(4, 17, count)
    return [
        Document(
            tokens=rng.integers(0, 128, n).astype(np.int32), loss_weights=np.ones(n, np.float32) * (i % 3 > 0)
        )
        for i, n in enumerate(sizes)
    ]


def trainer(axes: dict[str, int], *, rows: int = 2, measure_noise: bool = False):
    mesh = MeshSpec(ici=axes).build(jax.devices()[: int(np.prod(list(axes.values())))])
    built = trainable(MODEL, mesh, OptimizerConfig(), clip_norm=1.0)
    programs = built.programs(NextToken(), rows=rows, sequence_length=48, measure_noise=measure_noise)
    return programs, built.placement, built.initial_state(seed=0)


def one_step(setup, batch, *, weight=0.01, rate=1e-2):
    programs, placement, state = setup
    fresh = jax.tree.map(jnp.copy, state)
    return train_step(
        programs,
        placement,
        fresh,
        batch,
        ScheduledValues(learning_rate=rate, router_bias_rate=1e-3, balance_weight=weight, mtp_weight=0.0),
    )


@pytest.fixture(scope="module")
def single():
    return trainer({"fsdp": 1})


def test_microbatches_equal_one_big_batch_and_compile_once(single):
    """Same documents as 1 x 8 rows and as 3 x 2 rows: same update to 1e-6, and no program compiles twice."""
    docs = documents(24)
    big, big_report = one_step(single, pack(docs, rows=8, sequence_length=48), rate=1e-3)
    small_batch = pack(docs, rows=2, sequence_length=48)
    assert small_batch.tokens.shape[0] == 3
    small, small_report = one_step(single, small_batch, rate=1e-3)
    assert small_report.values["loss"] == pytest.approx(big_report.values["loss"], abs=1e-6)
    assert small_report.values["balance_loss"] == pytest.approx(big_report.values["balance_loss"], rel=1e-5)
    for path, value in big.params.items():
        np.testing.assert_allclose(small.params[path], value, atol=1e-6, err_msg=path)
    np.testing.assert_array_equal(small.buffers[BIAS], big.buffers[BIAS])
    programs = single[0]
    larger = pack(docs[:20] * 3, rows=2, sequence_length=48)
    assert larger.tokens.shape[0] > 2 * small_batch.tokens.shape[0]
    _, report = one_step(single, larger)
    assert report.compilations == 0
    assert programs.apply._cache_size() == 1


def test_memory_does_not_grow_with_the_batch(single):
    """Bytes of all live arrays while microbatches are added: the same for 3 of them and for 12."""
    programs, placement, state = single

    def peak(copies: int) -> int:
        seen = []

        def watched(*arguments):
            sums = programs.accumulate(*arguments)
            seen.append(sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted()))
            return sums

        batch = pack(documents(24) * copies, rows=2, sequence_length=48)
        one_step((dataclasses.replace(programs, accumulate=watched), placement, state), batch)
        assert len(seen) == batch.tokens.shape[0]
        return max(seen)

    gc.collect()
    assert peak(4) == peak(1)


def test_the_noise_scale_is_that_of_the_microbatches_and_changes_nothing(single):
    """The norm of each microbatch's gradient is the one it reports as a batch of its own."""
    batch = pack(documents(24), rows=2, sequence_length=48)
    norms, weights = [], []
    for index in range(3):
        alone = Batch({name: values[index : index + 1] for name, values in batch.columns.items()})
        report = one_step(single, alone, weight=0.0)[1].values
        weights.append(report["weight"])
        norms.append(report["gradient_norm"] * report["weight"])
    plain, whole = one_step(single, batch, weight=0.0)
    expected = estimate(
        square_norms=sum(norm**2 for norm in norms),
        square_weights=sum(weight**2 for weight in weights),
        weight=sum(weights),
        gradient_norm=whole.values["gradient_norm"],
    )
    state, found = one_step(trainer({"fsdp": 1}, measure_noise=True), batch, weight=0.0)
    assert found.values["noise_signal"] == pytest.approx(expected.signal, rel=1e-3)
    assert found.values["noise_trace"] == pytest.approx(expected.trace, rel=1e-3)
    assert "noise_trace" not in whole.values
    for path, value in plain.params.items():
        np.testing.assert_allclose(state.params[path], value, atol=1e-6, err_msg=path)


def test_the_loss_is_the_mean_over_weighted_tokens(single):
    batch = pack(documents(6), rows=4, sequence_length=32)
    _, report = one_step(single, batch, weight=0.0)
    _, _, state = single

    @jax.jit
    def logits(ids):
        model = DEFINITION.bind({**state.params, **state.buffers})
        hidden, _ = model(ids, jnp.arange(16)[None], jnp.asarray(ids >= 0, jnp.int32))
        return model.logits(hidden)[0]

    total = weight = 0.0
    for document in documents(6):
        size = len(document.tokens) - 1
        ids = np.full((1, 16), -1, np.int32)  # padding comes after the document
        ids[0, :size] = document.tokens[:-1]
        logprobs = np.asarray(jax.nn.log_softmax(logits(ids)))[:size]
        chosen = logprobs[np.arange(size), document.tokens[1:]]
        total -= float((chosen * document.loss_weights[1:]).sum())
        weight += float(document.loss_weights[1:].sum())
    assert report.values["loss"] == pytest.approx(total / weight, rel=1e-5)
    assert report.values["weight"] == weight
    assert report.values["tokens"] == sum(len(document.tokens) - 1 for document in documents(6))


def test_bias_moves_by_the_sign_of_the_global_load(single):
    """Counts are summed over microbatches before the sign is taken: here the sum of the microbatches' signs,
    its sign, and those of the first and last microbatch all differ from that.
    """
    batch = pack(documents(24), rows=2, sequence_length=48)
    programs, placement, before = single
    nothing = LossScales(balance=np.float32(0), mtp=np.float32(0))
    counts_MLE = np.stack(
        [
            programs.accumulate(before, programs.zero(), shard(one, placement.rows), nothing).expert_counts
            for one in batch.microbatches()
        ]
    )
    assert counts_MLE.shape[0] > 1

    def direction(counts_xE):
        return np.sign(counts_xE.mean(-1, keepdims=True) - counts_xE)

    expected, signs = direction(counts_MLE.sum(0)), direction(counts_MLE)
    for other in (signs.sum(0), np.sign(signs.sum(0)), signs[0], signs[-1]):
        assert (other != expected).any()
    state, _ = one_step(single, batch)
    moved = np.asarray(state.buffers[BIAS]) - np.asarray(before.buffers[BIAS])
    np.testing.assert_allclose(moved, 1e-3 * expected, rtol=1e-5)


def test_counts_of_tokens_are_exact_where_float32_has_no_odd_numbers(single):
    """2**24 + 1 is the first whole number that float32 lacks."""
    count = 2**24 + 1
    assert int(np.float32(count)) != count
    row = np.broadcast_to(np.int32(1), (1, 1, count))
    assert Batch(dict.fromkeys(STANDARD, row)).valid_tokens() == count
    programs, _, _ = single
    scalar = np.float32(1)
    names = {field.name: scalar for field in dataclasses.fields(StepMetrics)}
    metrics = StepMetrics(**names | {"load_violations": np.ones(1, np.float32)})
    values, _ = host_values(metrics, programs.zero(), tokens=count)
    assert values["tokens"] == count


def test_a_non_finite_batch_changes_nothing(single):
    batch = pack(documents(6), rows=4, sequence_length=32)
    weights = np.array(batch.loss_weights)
    weights[0, 0, 3] = np.nan
    poisoned = Batch(batch.columns | {"loss_weights": weights})
    state, report = one_step(single, poisoned)
    assert not report.finite
    before = single[2]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("axes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "expert": 2, "fsdp": 2}])
def test_a_mesh_trains_like_one_device(single, axes):
    batch = pack(documents(24), rows=8, sequence_length=48)
    expected, expected_report = one_step(single, batch)
    setup = trainer(axes, rows=8)
    state, report = one_step(setup, batch)
    assert report.values["loss"] == pytest.approx(expected_report.values["loss"], rel=1e-5)
    for path, value in expected.params.items():
        assert state.params[path].sharding == setup[1].state.params[path]
        np.testing.assert_allclose(state.params[path], value, atol=5e-5, err_msg=path)
    assert np.any(expected.buffers[BIAS])
    for path, value in expected.buffers.items():
        assert state.buffers[path].sharding == setup[1].state.buffers[path]
        np.testing.assert_array_equal(state.buffers[path], value, err_msg=path)
