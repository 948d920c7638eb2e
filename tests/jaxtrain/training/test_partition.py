"""Only what is trained has gradients, sums and optimizer state; a loss reads all the rest unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.batch import Batch, Column
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.base import LossSums, final_hidden
from jaxtrain.losses.next_token import NextToken
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define, initialize
from jaxtrain.optim.optimizer import Method, OptimizerConfig
from jaxtrain.training.build import Trainable, trainable
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.programs import train_step
from sharding.mesh import MeshSpec
from tests.jaxtrain.models.tiny import HF_CONFIG

MODEL = ModelConfig.from_hf(HF_CONFIG | {"num_hidden_layers": 2}, compute_dtype="float32")
DEFINITION = define(MODEL)
TRAINED = "moe/mlp/router/kernel"
ALL_BUT_ONE = OptimizerConfig(overrides={TRAINED: Method.adamw, "*": Method.frozen})
VALUES = ScheduledValues(learning_rate=0.01, router_bias_rate=0.0, balance_weight=0.0, mtp_weight=0.0)
REFERENCE = "reference/"


@dataclass(frozen=True)
class Distance:
    """Squared distance of the final hidden states from those of a further model, times a document's scale."""

    @property
    def columns(self) -> tuple[Column, ...]:
        return (Column("scale", "float32", 0.0, of="document"),)

    def __call__(self, definition, params, batch) -> LossSums:
        reference = {
            path.removeprefix(REFERENCE): value
            for path, value in params.items()
            if path.startswith(REFERENCE)
        }
        own = {path: value for path, value in params.items() if not path.startswith(REFERENCE)}
        hidden, router = final_hidden(definition, own, batch)
        wanted, _ = final_hidden(definition, reference, batch)
        weights = batch.loss_weights * batch["scale"]
        distance = (jnp.square(hidden - wanted).sum(-1) * weights).sum()
        return LossSums(
            loss=distance,
            weight=weights.sum(),
            metrics={"distance": distance, "twice_the_distance": 2 * distance},
            router=router,
        )


def mesh(axes: dict[str, int]):
    return MeshSpec(ici=axes).build(jax.devices()[: int(np.prod(list(axes.values())))])


def batch_of(loss) -> Batch:
    rng = np.random.default_rng(0)
    documents = [
        Document(
            tokens=rng.integers(0, 128, 9).astype(np.int32),
            loss_weights=np.ones(9, np.float32),
            columns={"scale": scale},
        )
        for scale in (1.0, 0.5)
    ]
    return pack(documents, rows=2, sequence_length=8, columns=loss.columns)


def step(built: Trainable, loss, state):
    programs = built.programs(loss, rows=2, sequence_length=8)
    return train_step(programs, built.placement, state, batch_of(loss), VALUES)


def test_what_is_frozen_has_no_gradient_no_sum_and_no_optimizer_state_and_keeps_its_bits():
    built = trainable(MODEL, mesh({"fsdp": 1}), ALL_BUT_ONE, clip_norm=1e9)
    state = built.initial_state(seed=0)
    paths = set(DEFINITION.shapes) - DEFINITION.buffers
    assert state.params.keys() == {TRAINED} and state.frozen.keys() == paths - {TRAINED}
    assert state.buffers.keys() == DEFINITION.buffers and state.model.keys() == DEFINITION.shapes.keys()
    # AdamW's two moments of one parameter, and counts.
    arrays = [leaf.shape for leaf in jax.tree.leaves(state.optimizer) if leaf.size > 1]
    assert arrays == [DEFINITION.shapes[TRAINED].shape] * 2
    sums = built.programs(NextToken(), rows=2, sequence_length=8).zero()
    assert sums.gradients.keys() == {TRAINED}
    before = jax.device_get(state)
    given = {path: jnp.asarray(value) for path, value in before.model.items()}
    after, report = step(built, NextToken(), state)
    for path, value in before.frozen.items():
        np.testing.assert_array_equal(after.frozen[path], value, err_msg=path)
    assert (np.asarray(after.params[TRAINED]) != before.params[TRAINED]).any()

    [microbatch] = batch_of(NextToken()).microbatches()

    def loss(kernel):
        out = NextToken()(DEFINITION, {**given, TRAINED: kernel}, microbatch)
        return out.loss / out.weight

    gradient = jax.jit(jax.grad(loss))(given[TRAINED])
    assert report.values["gradient_norm"] == pytest.approx(float(jnp.linalg.norm(gradient)), rel=1e-5)


def test_a_further_model_reaches_a_loss_unchanged_and_lies_as_the_models_own_parameters():
    further = {REFERENCE + path: shape for path, shape in DEFINITION.shapes.items()}
    built = trainable(
        MODEL, mesh({"fsdp": 2, "tensor": 2}), OptimizerConfig(), clip_norm=1.0, further=further
    )
    where = built.placement.state
    for path in further:
        own = path.removeprefix(REFERENCE)
        assert where.frozen[path] == (where.params | where.buffers)[own]
    reference = initialize(MODEL, seed=1)
    placed = {
        REFERENCE + path: jax.device_put(value, where.frozen[REFERENCE + path])
        for path, value in reference.items()
    }
    state = built.initial_state(seed=0, further=placed)
    assert state.frozen.keys() == further.keys()
    assert state.params.keys() == set(DEFINITION.shapes) - DEFINITION.buffers
    before = jax.device_get(state)
    after, report = step(built, Distance(), state)
    for path, value in reference.items():
        np.testing.assert_array_equal(after.frozen[REFERENCE + path], value, err_msg=path)
    assert any((np.asarray(after.params[path]) != value).any() for path, value in before.params.items())

    [microbatch] = batch_of(Distance()).microbatches()
    own = {path: value for path, value in before.model.items() if not path.startswith(REFERENCE)}
    hidden, wanted = (
        np.asarray(jax.jit(lambda p: final_hidden(DEFINITION, p, microbatch)[0])(p)) for p in (own, reference)
    )
    weights = microbatch.loss_weights * microbatch["scale"]
    expected = ((hidden - wanted) ** 2 * weights[..., None]).sum() / weights.sum()
    assert weights.sum() == 8 * 1.5  # of the loss, which the step divides by
    assert report.values["weight"] == weights.sum()
    assert report.values["loss"] == pytest.approx(expected, rel=1e-4)
    # The loss names its own metrics, means over its own weight.
    assert report.values["distance"] == pytest.approx(expected, rel=1e-4)
    assert report.values["twice_the_distance"] == pytest.approx(2 * expected, rel=1e-4)
    assert "entropy" not in report.values


def test_a_pattern_that_freezes_nothing_is_refused():
    with pytest.raises(ValueError, match=r"optimizer.overrides: 'reference/\*' matches no parameter"):
        trainable(
            MODEL,
            mesh({"fsdp": 1}),
            OptimizerConfig(overrides={"reference/*": Method.frozen}),
            clip_norm=1.0,
        )
