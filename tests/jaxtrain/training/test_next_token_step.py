"""Steps on next tokens with balance and MTP losses, on a Markov chain, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtrain.losses.next_token import NextToken
from tests.jaxtrain.training import markov
from tests.jaxtrain.training.markov import BITS, ENTROPY, HIDDEN, PROBABILITIES

BODY, MTP = "moe/mlp/router", "mtp/layer/mlp/router"


@pytest.fixture(scope="module")
def setup() -> markov.Setup:
    return markov.compiled(NextToken())


def test_a_step_is_the_mean_over_token_weight_of_all_microbatches(setup):
    """d -log p(v | d) / d head[d] = (p - 1[v]) * hidden. 3 rows are 2 microbatches; W = 1.5 + 2 + 0.5."""
    documents = [
        markov.document([0, 1, 0, 2], weights=[1, 0.5, 0]),
        markov.document([2, 2, 2], weights=[1, 1]),
        markov.document([3, 0, 1], weights=[0.5, 0]),
    ]
    found = markov.step(setup, markov.batch(*documents), learning_rate=0.25)
    bits = 1 * BITS[0, 1] + 0.5 * BITS[1, 0] + 2 * BITS[2, 2] + 0.5 * BITS[3, 0]
    assert found.values["loss"] == pytest.approx(bits * np.log(2) / 4, rel=1e-5)
    assert found.values["weight"] == 4
    assert found.values["tokens"] == 7
    pulls = ((0, 1, 1.0), (1, 0, 0.5), (2, 2, 2.0), (3, 0, 0.5))
    gradient = np.zeros((4, 4))
    for token, target, weight in pulls:
        gradient[token] += weight * (PROBABILITIES[token] - np.eye(4)[target]) * HIDDEN / 4
    np.testing.assert_allclose(found.moved["lm_head/kernel"], -0.25 * gradient, atol=1e-6)


def test_the_balance_loss_is_a_mean_over_valid_tokens_of_any_loss_weight(setup):
    """Two experts of score 1/2, all tokens on expert 0: f = (2, 0), the loss of a row is 2 * P_0 = 1.

    P_0 = s_0 / (s_0 + s_1), so d P_0 / d logit_0 = 1/8 = -d P_0 / d logit_1. A token's input to the router is
    2 on its own channel. The gradient by channel d is therefore 2 * 1/8 * 2 = 1/2 times the share of token d
    among the valid tokens. One row has 3 tokens and one has 1, so a mean over rows would weigh token 1 as
    token 0. Loss weights of 1/2 make the step's denominator W = 2, not 4.
    """
    documents = (
        markov.document([0, 0, 0, 1], weights=[0.5] * 3),
        markov.document([1, 2], weights=[0.5]),
    )
    found = markov.step(setup, markov.batch(*documents), balance_weight=0.1)
    gradient_0 = 0.5 * np.array([3, 1, 0, 0]) / 4
    expected = -0.1 * np.stack([gradient_0, -gradient_0], axis=-1)[None]
    np.testing.assert_allclose(found.moved[f"{BODY}/kernel"], expected, atol=1e-6)
    without = markov.step(setup, markov.batch(*documents))
    np.testing.assert_array_equal(without.moved[f"{BODY}/kernel"], 0)


def test_an_mtp_layer_moves_by_its_weight_times_its_mean_loss(setup):
    """It sees token d and predicts v: the gradient by channel d of the norm before the head is
    sum_u (p(u) - 1[u = v]) * log p(u) = -log p(v | d) - entropy, surprise less its mean.

    Of 0 -> 2 -> 1 -> 3 it sees 2 and predicts 1 (weight 2), sees 1 and predicts 3 (weight 1/2); W = 3.5.
    """
    batch = markov.batch(markov.document([0, 2, 1, 3], weights=[1, 2, 0.5]))
    surprise_21, surprise_13 = BITS[2, 1] * np.log(2), BITS[1, 3] * np.log(2)
    found = {weight: markov.step(setup, batch, mtp_weight=weight) for weight in (0.0, 0.3)}
    for weight, step in found.items():
        expected = np.zeros((1, 4))
        expected[0, 2] = -weight * 2 * (surprise_21 - ENTROPY) / 3.5
        expected[0, 1] = -weight * 0.5 * (surprise_13 - ENTROPY) / 3.5
        np.testing.assert_allclose(step.moved["mtp/output_norm"], expected, atol=1e-6)
        assert step.values["mtp_loss"] == pytest.approx((2 * surprise_21 + 0.5 * surprise_13) / 3.5, rel=1e-5)


def test_each_correction_bias_moves_by_the_counts_of_its_own_layer(setup):
    """The body sends all tokens to expert 0, the MTP layer all to expert 1: the one that is chosen falls."""
    found = markov.step(setup, markov.batch(markov.document([0, 1, 2])), router_bias_rate=0.01)
    np.testing.assert_allclose(found.moved[f"{BODY}/correction_bias"], [[-0.01, 0.01]], rtol=1e-6)
    np.testing.assert_allclose(found.moved[f"{MTP}/correction_bias"], [[0.01, -0.01]], rtol=1e-6)
