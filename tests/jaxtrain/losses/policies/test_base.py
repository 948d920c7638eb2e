"""A step of the policy gradient on a Markov chain, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtrain.losses.policies.double_sided import DoubleSided
from tests.jaxtrain.training import markov
from tests.jaxtrain.training.markov import HIDDEN, PROBABILITIES

# At temperature 1/2 probabilities are squared: 1/4, 1/16, 1/64, 1/64 over their sum 22/64.
SHARP = np.array([1, 16, 4, 1]) / 22
INSIDE, OUTSIDE = 1.75, 0.4  # of the window (0.5, 2); of (0, 1.5) it would be the other way round


@pytest.fixture(scope="module")
def setup() -> markov.Setup:
    return markov.compiled(DoubleSided(eps_low=0.5, eps_high=1.0))


def rollouts():
    """0 -> 1 -> 2 at temperature 1/2 and advantage 3: one token inside the window and one outside.

    3 -> 1 -> 2 at temperature 1 and advantage -2: one token of ratio 1, and one that is not trained on.
    """
    return markov.batch(
        markov.document(
            [0, 1, 2],
            behavior_logprobs=[np.log(16 / 22 / INSIDE), np.log(16 / 22 / OUTSIDE)],
            advantage=3.0,
            temperature=0.5,
        ),
        markov.document([3, 1, 2], weights=[1, 0], behavior_logprobs=[np.log(1 / 4), 0.0], advantage=-2.0),
    )


def test_a_step_raises_what_was_better_and_lowers_what_was_worse(setup):
    """d log p(v | d) / d head[d, u] = (1[u = v] - p(u)) * hidden / temperature; times ratio * advantage over
    the 3 trainable tokens, of which one is outside the window and adds nothing.
    """
    found = markov.step(setup, rollouts())
    expected = np.zeros((4, 4))
    expected[0] = INSIDE * 3 * (np.eye(4)[1] - SHARP) * HIDDEN / 0.5 / 3
    expected[3] = 1 * -2 * (np.eye(4)[1] - PROBABILITIES[3]) * HIDDEN / 3
    np.testing.assert_allclose(found.moved["lm_head/kernel"], expected, atol=1e-5)


def test_values_are_means_over_all_trainable_tokens(setup):
    found = markov.step(setup, rollouts()).values
    assert found["weight"] == 3
    assert found["loss"] == pytest.approx(-(INSIDE * 3 * np.log(16 / 22) - 2 * np.log(1 / 4)) / 3, rel=1e-5)
    assert found["inside_fraction"] == pytest.approx(2 / 3)
    assert found["ratio"] == pytest.approx((INSIDE + OUTSIDE + 1) / 3, rel=1e-5)
    log_squares = np.log(INSIDE) ** 2 + np.log(OUTSIDE) ** 2
    assert found["log_ratio_squared"] == pytest.approx(log_squares / 3, rel=1e-5)
    sharp = -(SHARP * np.log(SHARP)).sum()
    assert found["entropy"] == pytest.approx((2 * sharp + markov.ENTROPY) / 3, rel=1e-5)


def test_mtp_layers_learn_beside_the_policy_and_leave_it_alone(setup):
    """Of 0 -> 1 -> 2 the layer sees 1 and predicts 2, a surprise of 1 bit at temperature 1. The norm before
    the head moves by the mean over 3 tokens of surprise less entropy, as in `test_next_token_step`.
    """
    without, found = (markov.step(setup, rollouts(), mtp_weight=weight) for weight in (0.0, 0.5))
    expected = np.zeros((1, 4))
    expected[0, 1] = -0.5 * (np.log(2) - markov.ENTROPY) / 3
    np.testing.assert_allclose(found.moved["mtp/output_norm"], expected, atol=1e-6)
    for path, moved in without.moved.items():
        if path.startswith("mtp/"):
            assert not moved.any(), path
        else:
            np.testing.assert_array_equal(found.moved[path], moved, err_msg=path)
