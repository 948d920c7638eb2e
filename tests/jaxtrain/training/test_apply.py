"""One step of given sums, by hand: division, clipping, and what is skipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.training.state import TrainState
from jaxtrain.training.step import StepInputs, StepMetrics, Sums, apply

BODY, MTP = "moe/mlp/router/correction_bias", "mtp/layer/mlp/router/correction_bias"
# With momentum, so that a step changes the optimizer's state too.
OPTIMIZER = optax.chain(optax.trace(0.5), optax.scale(-1.0))


def state(momentum: float = 0.0) -> TrainState:
    params = {"w": jnp.array([1.0, 2.0])}
    return TrainState(
        params=params,
        frozen={"kept": jnp.array([3.0])},
        buffers={BODY: jnp.zeros((1, 2)), MTP: jnp.zeros((2, 2))},
        optimizer=jax.tree.map(lambda x: x + momentum, OPTIMIZER.init(params)),
    )


def step(
    *,
    gradient: list[float],
    loss: float = 3.0,
    weight: float = 2.0,
    clip_norm: float = 100.0,
    momentum: float = 0.0,
) -> tuple[TrainState, StepMetrics]:
    """Of a batch in which the body's layer counted 3 and 1 tokens, those of MTP 0 and 4, then 2 and 2."""
    sums = Sums(
        gradients={"w": jnp.array(gradient)},
        loss=jnp.float32(loss),
        weight=jnp.float32(weight),
        balance=jnp.float32(6),
        tokens=jnp.float32(4),
        expert_counts=jnp.array([[3.0, 1.0], [0.0, 4.0], [2.0, 2.0]]),
        metrics={},
    )
    inputs = StepInputs(learning_rate=np.float32(0.5), router_bias_rate=np.float32(0.1))
    return apply(OPTIMIZER, clip_norm, state(momentum), sums, inputs)


def test_a_gradient_is_divided_by_the_weight_then_clipped():
    """(6, 8) over weight 2 is (3, 4), of norm 5: at clip norm 10 it stays, at 1 it becomes (0.6, 0.8)."""
    for clip_norm, moved in ((10.0, [1.5, 2.0]), (1.0, [0.3, 0.4])):
        after, metrics = step(gradient=[6, 8], clip_norm=clip_norm)
        np.testing.assert_allclose(after.params["w"], np.array([1.0, 2.0]) - moved, rtol=1e-6)
        assert float(metrics.gradient_norm) == pytest.approx(5)
        assert float(metrics.update_rms) == pytest.approx(np.sqrt((moved[0] ** 2 + moved[1] ** 2) / 2))


def test_what_a_step_reports_are_means():
    """Loss 3 over weight 2, balance 6 over 4 tokens; load 3 of a mean of 2, 4 of 2, 2 of 2."""
    _, metrics = step(gradient=[6, 8])
    assert float(metrics.loss) == 1.5
    assert float(metrics.balance_loss) == 1.5
    np.testing.assert_allclose(metrics.load_violations, [0.5, 1.0, 0.0])
    assert float(metrics.load_violation) == 1.0
    assert bool(metrics.finite)


def test_correction_biases_move_by_the_rows_of_their_own_layers():
    after, _ = step(gradient=[6, 8])
    np.testing.assert_allclose(after.buffers[BODY], [[-0.1, 0.1]], rtol=1e-6)
    np.testing.assert_allclose(after.buffers[MTP], [[0.1, -0.1], [0.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient": [float("nan"), 8]},
        {"gradient": [float("inf"), 8]},
        {"gradient": [6, 8], "loss": float("nan")},
        {"gradient": [6, 8], "weight": 0.0},
    ],
    ids=["gradient nan", "gradient inf", "loss nan", "no weight"],
)
def test_a_step_that_cannot_be_made_changes_nothing(wrong):
    """Parameters, biases and a momentum that decays in every step; each case has one wrong value alone."""
    before, (after, metrics) = state(momentum=1.0), step(momentum=1.0, **wrong)
    assert not metrics.finite
    assert float(metrics.update_rms) == 0
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new, old)
