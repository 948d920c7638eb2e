"""The estimate of the noise scale against gradients whose signal and noise are known."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.optim.noise_scale import NoiseEstimate, add, empty, estimate, smoothed


def step(rng: np.random.Generator, signal: np.ndarray, noise: float, weights: list[int]):
    """Microbatches of `weights` tokens, each token's gradient `signal` plus Gaussian noise."""
    sums, total = empty(), np.zeros_like(signal)
    for weight in weights:
        gradient = weight * signal + noise * weight**0.5 * rng.normal(size=signal.shape)
        halves = {"a": jnp.asarray(gradient[:3]), "b": jnp.asarray(gradient[3:])}
        sums = add(sums, halves, jnp.float32(weight))
        total += gradient
    norm = float(np.linalg.norm(total / sum(weights)))
    return estimate(
        square_norms=float(sums.square_norms),
        square_weights=float(sums.square_weights),
        weight=float(sum(weights)),
        gradient_norm=norm,
    )


@pytest.mark.parametrize("weights", [[32] * 8, [5, 64, 17, 33, 1, 40]])
def test_it_is_unbiased_whatever_the_microbatches_weigh(weights):
    """|G|^2 = 5 x 0.2^2 and S = 5 x 2^2 by construction: the noise scale is 100 tokens."""
    rng = np.random.default_rng(0)
    found = [step(rng, np.full(5, 0.2), 2.0, weights) for _ in range(600)]
    assert np.mean([one.signal for one in found]) == pytest.approx(5 * 0.04, rel=0.1)
    assert np.mean([one.trace for one in found]) == pytest.approx(5 * 4.0, rel=0.1)


def test_without_noise_the_scale_is_zero():
    found = step(np.random.default_rng(0), np.full(5, 0.2), 0.0, [8, 8])
    assert found.signal == pytest.approx(0.2, rel=1e-5)
    assert found.trace == pytest.approx(0.0, abs=1e-5)


def test_one_microbatch_says_nothing():
    assert step(np.random.default_rng(0), np.ones(5), 1.0, [8]) is None
    assert estimate(square_norms=1.0, square_weights=64.0, weight=8.0, gradient_norm=1.0) is None
    assert estimate(square_norms=0.0, square_weights=0.0, weight=0.0, gradient_norm=0.0) is None


def test_averages_are_taken_before_the_ratio():
    estimates = [NoiseEstimate(signal=1.0, trace=50.0), NoiseEstimate(signal=3.0, trace=150.0)]
    assert smoothed(estimates, decay=0.5) == [50.0, pytest.approx((0.25 * 50 + 0.5 * 150) / (0.25 + 1.5))]
    negative = [NoiseEstimate(signal=-1.0, trace=5.0), NoiseEstimate(signal=1.0, trace=-9.0)]
    assert smoothed(negative, decay=0.5) == [None, 0.0]
