"""Double-sided importance sampling against hand calculation."""

# N tokens

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.losses.policies.base import PolicyTokens
from jaxtrain.losses.policies.double_sided import DoubleSided


def tokens(logprobs_N, behavior_logprobs_N, advantages_N, weights_N=None) -> PolicyTokens:
    """All of one document."""
    size = len(logprobs_N)
    return PolicyTokens(
        logprobs_N=logprobs_N,
        behavior_logprobs_N=behavior_logprobs_N,
        advantages_N=advantages_N,
        weights_N=jnp.ones(size) if weights_N is None else weights_N,
        documents_N=jnp.ones(size, jnp.int32),
        num_documents=2,
    )


def test_window_masks_tokens_and_weighs_the_rest_by_their_ratio():
    """r = 1, 1.5, 2.5 (above 1 + 1), 0.4 (below 1 - 0.5).

    The gradient of -r * A * log pi is -r * A inside, 0 outside.
    """
    behavior = jnp.log(jnp.array([0.2, 0.2, 0.2, 0.5]))
    logprobs = jnp.log(jnp.array([0.2, 0.3, 0.5, 0.2]))
    advantages = jnp.array([1.0, -2.0, 1.0, 1.0])
    loss = DoubleSided(eps_low=0.5, eps_high=1.0)

    def objective(logprobs):
        return loss.objective(tokens(logprobs, behavior, advantages))

    value, metrics = objective(logprobs)
    assert float(metrics["inside_fraction"]) == 2
    assert float(metrics["ratio"]) == pytest.approx(1 + 1.5 + 2.5 + 0.4)
    log_ratios = np.log([1, 1.5, 2.5, 0.4])
    assert float(metrics["log_ratio_squared"]) == pytest.approx((log_ratios**2).sum(), rel=1e-5)
    assert float(value) == pytest.approx(-(1 * np.log(0.2) + 1.5 * -2 * np.log(0.3)))
    gradient = jax.grad(lambda x: objective(x)[0])(logprobs)
    np.testing.assert_allclose(gradient, [-1.0, 3.0, 0.0, 0.0], rtol=1e-6)


def test_weights_scale_loss_and_metrics():
    """Three tokens of ratio 1: weights 0, 1 and 2."""
    half = jnp.log(jnp.full(3, 0.5))
    value, metrics = DoubleSided().objective(
        tokens(half, half, jnp.array([5.0, 1.0, 1.0]), jnp.array([0.0, 1.0, 2.0]))
    )
    assert float(value) == pytest.approx(3 * np.log(2))
    assert {name: float(value) for name, value in metrics.items()} == {
        "inside_fraction": 3.0,
        "ratio": 3.0,
        "log_ratio_squared": 0.0,
    }


@pytest.mark.parametrize(("ratio", "inside"), [(1.0, 1), (0.5, 0), (1.5, 0)])
def test_the_window_is_open_at_both_ends(ratio, inside):
    """A ratio inside, at the lower end and at the upper end, each exact in float32."""
    near = np.float32(np.log(ratio)) + np.arange(-8, 9, dtype=np.float32) * np.float32(2**-25)
    [at, *_] = near[np.asarray(jnp.exp(jnp.asarray(near))) == np.float32(ratio)]
    _, metrics = DoubleSided(eps_low=0.5, eps_high=0.5).objective(
        tokens(jnp.full(1, at), jnp.zeros(1), jnp.ones(1))
    )
    assert float(metrics["ratio"]) == ratio and float(metrics["inside_fraction"]) == inside


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"eps_low": 0.0}, r"eps_low: 0.0 is not in \(0, 1\]"),
        ({"eps_low": 1.1}, r"eps_low: 1.1 is not in \(0, 1\]"),
        ({"eps_high": 0.0}, r"eps_high: 0.0 is not in \(0, inf\)"),
    ],
)
def test_an_empty_window_is_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        DoubleSided(**options)
