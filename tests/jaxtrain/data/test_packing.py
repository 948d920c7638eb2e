"""Packing loses nothing, never overlaps, and depends on nothing but the documents."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.packing import Document, PackingError, best_fit, pack

LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=30)


def documents_of(lengths: list[int]) -> list[Document]:
    rng = np.random.default_rng(len(lengths))
    return [
        Document(
            tokens=np.arange(n, dtype=np.int32) + 100 * i,
            loss_weights=rng.random(n).astype(np.float32),
            behavior_logprobs=-rng.random(n).astype(np.float32),
            versions=np.full(n, i, np.int32),
            advantage=float(i),
            temperature=0.5,
        )
        for i, n in enumerate(lengths)
    ]


@given(LENGTHS)
@settings(max_examples=60, deadline=None)
def test_every_document_is_in_the_batch_once(lengths):
    documents = documents_of(lengths)
    batch = pack(documents, rows=3, sequence_length=12)
    rows = [np.asarray(x).reshape(-1, 12) for x in (batch.tokens, batch.targets, batch.segment_ids)]
    found = {}
    for tokens, targets, segments, *rest in zip(
        *rows,
        *(
            np.asarray(getattr(batch, n)).reshape(-1, 12)
            for n in (
                "positions",
                "loss_weights",
                "versions",
                "advantages",
                "behavior_logprobs",
                "temperature",
            )
        ),
        strict=True,
    ):
        positions, weights, versions, advantages, behavior, temperature = rest
        for segment in set(segments.tolist()) - {0}:
            at = segments == segment
            index = int(advantages[at][0])
            assert index not in found
            found[index] = True
            document = documents[index]
            np.testing.assert_array_equal(tokens[at], document.tokens[:-1])
            np.testing.assert_array_equal(targets[at], document.tokens[1:])
            np.testing.assert_array_equal(positions[at], np.arange(at.sum()))
            np.testing.assert_array_equal(weights[at], document.loss_weights[1:])
            np.testing.assert_array_equal(versions[at], document.versions[1:])
            np.testing.assert_array_equal(behavior[at], document.behavior_logprobs[1:])
            np.testing.assert_array_equal(temperature[at], document.temperature)
    assert sorted(found) == list(range(len(documents)))
    padding = np.asarray(batch.segment_ids) == 0
    assert not np.asarray(batch.loss_weights)[padding].any()


@given(LENGTHS)
@settings(max_examples=60, deadline=None)
def test_bins_respect_the_capacity_and_waste_less_than_half(lengths):
    bins = best_fit(lengths, 12)
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert max(loads) <= 12
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert len(bins) == 1 or sum(loads) > 6 * (len(bins) - 1)


def test_a_document_longer_than_a_row_is_refused_by_name():
    with pytest.raises(PackingError, match=r"document 0 has 12 tokens, more than batch.sequence_length 11"):
        pack(documents_of([13]), rows=1, sequence_length=11)


def test_routed_experts_travel_with_their_input_tokens():
    """[T, layers, k] of T tokens: the last is no input; other documents and padding choose for themselves."""
    experts = np.arange(4 * 2 * 3, dtype=np.int16).reshape(4, 2, 3)
    tokens, weights = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    known = Document(tokens=tokens, loss_weights=weights, routed_experts=experts)
    unknown = Document(tokens=tokens[:3], loss_weights=weights[:3])
    batch = pack([known, unknown], rows=2, sequence_length=6)
    assert batch.routed_experts is not None and batch.routed_experts.shape == (1, 2, 6, 2, 3)
    [microbatch] = batch.microbatches()
    np.testing.assert_array_equal(microbatch.routed_experts[0, :3], experts[:3])
    assert (microbatch.routed_experts[0, 3:] == -1).all() and (microbatch.routed_experts[1] == -1).all()
    [without] = pack([unknown], rows=1, sequence_length=6).microbatches()
    assert without.routed_experts is None
    filled = pack([unknown], rows=2, sequence_length=6, routed_experts=(2, 3))
    assert jax.tree.structure(filled) == jax.tree.structure(batch)  # one program for both
    assert filled.routed_experts is not None and filled.routed_experts.shape == (1, 2, 6, 2, 3)
    assert (filled.routed_experts == -1).all()
    other = Document(tokens=tokens, loss_weights=weights, routed_experts=experts[:, :1])
    with pytest.raises(PackingError, match=r"\[\(1, 3\), \(2, 3\)\]"):
        pack([known, other], rows=2, sequence_length=6)
