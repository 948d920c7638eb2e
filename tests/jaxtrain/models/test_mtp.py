"""MTP: what depths see and predict, the loss by its equations, drafts; off is as before."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.packing import Document, pack
from jaxtrain.losses import mtp
from jaxtrain.losses.mtp import MtpTargets, draft_loss, mtp_targets
from jaxtrain.losses.next_token import NextToken
from jaxtrain.losses.policies.base import POLICY_COLUMNS
from jaxtrain.losses.policies.double_sided import DoubleSided
from jaxtrain.losses.target_logprobs import target_nll
from jaxtrain.models.definition import define, initialize
from jaxtrain.models.layers import Cache
from tests.jaxtrain.models.forward import CONFIG, perturbed_parameters

DEPTHS = 2
WITH = dataclasses.replace(
    CONFIG,
    num_hidden_layers=1,
    first_k_dense_replace=0,
    num_nextn_predict_layers=DEPTHS,
    n_routed_experts=4,
    n_shared_experts=0,
)
WITHOUT = dataclasses.replace(WITH, num_nextn_predict_layers=0)


def batch_of(*lengths: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    documents = [
        Document(
            tokens=rng.integers(1, 128, n).astype(np.int32),
            loss_weights=rng.uniform(0.5, 1.5, n).astype("f4"),
        )
        for n in lengths
    ]
    [batch] = pack(documents, rows=2, sequence_length=12, columns=POLICY_COLUMNS).microbatches()
    return batch


@pytest.fixture(scope="module")
def params() -> dict[str, jax.Array]:
    return perturbed_parameters(seed=1, config=WITH)


def test_what_depths_see_by_hand():
    """Documents 1 2 3 4 5 and 6 7 8 in a row of 7 inputs: depth 1 at token 1 sees 2 and predicts 3."""
    documents = [
        Document(
            tokens=np.arange(start, stop, dtype=np.int32), loss_weights=np.arange(start, stop, dtype="f4")
        )
        for start, stop in ((1, 6), (6, 9))
    ]
    [batch] = pack(documents, rows=1, sequence_length=7).microbatches()
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 6, 7, 0]]
    ahead = mtp_targets(batch, 2)
    assert ahead.tokens[0, 0, :6].tolist() == [2, 3, 4, 5, 7, 8]
    assert ahead.weights[0].tolist() == [[3, 4, 5, 0, 8, 0, 0]]
    assert ahead.targets[0, 0, [0, 1, 2, 4]].tolist() == [3, 4, 5, 8]
    assert ahead.tokens[1, 0, :2].tolist() == [3, 4]
    assert ahead.weights[1].tolist() == [[4, 5, 0, 0, 0, 0, 0]]
    assert ahead.targets[1, 0, :2].tolist() == [4, 5]
    assert ahead.segment_ids.tolist() == [[[1, 1, 1, 0, 2, 0, 0]], [[1, 1, 0, 0, 0, 0, 0]]]


def test_without_mtp_the_model_has_the_same_bits(params):
    """The same seed makes the same body, and the body computes the same."""
    bare, full = initialize(WITHOUT, seed=3), initialize(WITH, seed=3)
    assert {path for path in full if path not in bare} == {path for path in full if path.startswith("mtp/")}
    for path, value in bare.items():
        np.testing.assert_array_equal(full[path], value, err_msg=path)
    batch = batch_of(9, 8, 5)
    body = {path: value for path, value in params.items() if not path.startswith("mtp/")}
    alone = jax.jit(lambda p: NextToken()(define(WITHOUT), p, batch))(body)
    beside = jax.jit(lambda p: NextToken()(define(WITH), p, batch))(params)
    assert alone.mtp is None
    np.testing.assert_array_equal(beside.loss, alone.loss)
    np.testing.assert_array_equal(beside.router.counts[: WITH.num_moe_layers], alone.router.counts)
    # Depth 1 counts tokens that have a token two ahead, depth 2 those that have one three ahead.
    k = WITH.num_experts_per_tok
    counted = beside.router.counts[WITH.num_moe_layers :].sum(-1)
    np.testing.assert_array_equal(counted, [k * (7 + 6 + 3), k * (6 + 5 + 2)])


def test_the_loss_is_the_mean_of_the_depths_over_the_logits_of_drafts(params):
    """Equation 24-25 in numpy, over logits that drafting token by token gives (which no document mask takes
    part in): so drafts, masks and loss agree."""
    batch = batch_of(10, 7, 5)
    definition = define(WITH)

    @jax.jit
    def both(params):
        model = definition.bind(params)
        hidden, _ = model(*(jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids)))
        return hidden, draft_loss(definition, params, hidden, batch).loss

    @jax.jit
    def draft(hidden, tokens, positions, caches):
        model = definition.bind(params)
        logits = []
        for depth in range(DEPTHS):
            hidden, caches = model.draft(hidden, tokens[depth], positions, caches, depth=depth)
            logits.append(model.logits(hidden))
        return jnp.stack(logits), caches

    hidden, loss = both(params)
    ahead = mtp_targets(batch, DEPTHS)
    expected = 0.0
    for row in range(2):
        for document in range(1, int(batch.segment_ids[row].max()) + 1):
            members = np.flatnonzero(batch.segment_ids[row] == document)
            shape = (DEPTHS, 1, 12, WITH.num_key_value_heads, WITH.head_dim)
            caches = Cache(jnp.zeros(shape), jnp.zeros(shape))
            for position, at in enumerate(members):
                logits, caches = draft(
                    hidden[row, at][None, None],
                    ahead.tokens[:, row, at][:, None, None],
                    jnp.full((1, 1), position),
                    caches,
                )
                logprobs = jax.nn.log_softmax(logits[:, 0, 0].astype(jnp.float32))
                chosen = np.take_along_axis(
                    np.asarray(logprobs), np.asarray(ahead.targets[:, row, at])[:, None], 1
                )
                expected -= float((chosen[:, 0] * np.asarray(ahead.weights[:, row, at])).sum()) / DEPTHS
    assert expected > 0
    assert float(loss) == pytest.approx(expected, rel=2e-5)


def test_tokens_without_weight_are_not_projected(params, monkeypatch):
    batch = batch_of(9, 8, 5)
    ahead = MtpTargets(
        **{name: np.asarray(value) for name, value in vars(mtp_targets(batch, DEPTHS)).items()}
    )
    seen = []

    def watched(*arguments):
        seen.append(arguments[-1])
        return target_nll(*arguments)

    monkeypatch.setattr(mtp, "mtp_targets", lambda batch, depths: ahead)
    monkeypatch.setattr(mtp, "target_nll", watched)
    hidden = jax.ShapeDtypeStruct((*batch.tokens.shape, WITH.hidden_size), jnp.float32)
    jax.eval_shape(lambda hidden: draft_loss(define(WITH), params, hidden, batch).loss, hidden)
    [weights] = seen
    assert 0 < (ahead.weights == 0).sum() < ahead.weights.size
    np.testing.assert_array_equal(weights, ahead.weights)


def test_gradients_reach_every_mtp_parameter_and_in_rl_nothing_else(params):
    batch = batch_of(9, 8, 5)
    definition = define(WITH)
    trained = {path: value for path, value in params.items() if path not in definition.buffers}
    buffers = {path: params[path] for path in definition.buffers}

    def gradients(loss):
        return jax.jit(jax.grad(lambda p: loss(definition, {**p, **buffers}, batch).mtp))(trained)

    supervised = gradients(NextToken())
    assert all(np.abs(gradient).max() > 0 for gradient in supervised.values())
    reinforced = gradients(DoubleSided())
    for path, gradient in reinforced.items():
        assert bool(np.abs(gradient).max() > 0) == path.startswith("mtp/"), path
