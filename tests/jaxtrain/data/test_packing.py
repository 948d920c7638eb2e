"""Packing loses nothing, never overlaps, and depends on nothing but the documents and the columns."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.batch import STANDARD, Column, microbatch_shapes
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.next_token import NextToken
from rollout_bridge.trajectories.packing import PackingError, best_fit

LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=30)


COLUMNS = (
    Column("index", "int32", -1, of="document"),
    Column("versions", "int32", -1, of="target"),
    Column("seen", "float32", 0.0, of="input"),
)


def documents_of(lengths: list[int]) -> list[Document]:
    rng = np.random.default_rng(len(lengths))
    return [
        Document(
            tokens=np.arange(n, dtype=np.int32) + 100 * i,
            loss_weights=rng.random(n).astype(np.float32),
            columns={
                "index": i,
                "versions": rng.integers(0, 9, n).astype(np.int32),
                "seen": rng.random(n).astype(np.float32),
                "of no loss": 1.0,
            },
        )
        for i, n in enumerate(lengths)
    ]


@given(LENGTHS)
@settings(max_examples=60, deadline=None)
def test_every_document_is_in_the_batch_once(lengths):
    documents = documents_of(lengths)
    batch = pack(documents, rows=3, sequence_length=12, columns=COLUMNS)
    assert batch.columns.keys() == {*STANDARD, "index", "versions", "seen"}
    rows = {name: np.asarray(values).reshape(-1, 12) for name, values in batch.columns.items()}
    found = set()
    for row, segments in enumerate(rows["segment_ids"]):
        for segment in set(segments.tolist()) - {0}:
            at = {name: values[row][segments == segment] for name, values in rows.items()}
            [index] = set(at["index"].tolist())
            assert index not in found
            found.add(index)
            document = documents[index]
            np.testing.assert_array_equal(at["tokens"], document.tokens[:-1])
            np.testing.assert_array_equal(at["targets"], document.tokens[1:])
            np.testing.assert_array_equal(at["positions"], np.arange(len(document.tokens) - 1))
            np.testing.assert_array_equal(at["loss_weights"], document.loss_weights[1:])
            np.testing.assert_array_equal(at["versions"], document.columns["versions"][1:])
            np.testing.assert_array_equal(at["seen"], document.columns["seen"][:-1])
    assert found == set(range(len(documents)))
    padding = rows["segment_ids"] == 0
    assert not rows["loss_weights"][padding].any()
    for column in COLUMNS:
        assert (rows[column.name][padding] == column.fill).all()


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


def test_values_of_inputs_may_have_axes_and_are_filled_where_a_document_has_none():
    """[T, layers, k] of T tokens: the last is no input; other documents and padding get the fill."""
    column = Column("experts", "int16", -1, of="input", shape=(2, 3))
    experts = np.arange(4 * 2 * 3, dtype=np.int16).reshape(4, 2, 3)
    tokens, weights = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    known = Document(tokens=tokens, loss_weights=weights, columns={"experts": experts})
    unknown = Document(tokens=tokens[:3], loss_weights=weights[:3])
    batch = pack([known, unknown], rows=2, sequence_length=6, columns=(column,))
    assert batch["experts"].shape == (1, 2, 6, 2, 3) and batch["experts"].dtype == np.int16
    [microbatch] = batch.microbatches()
    np.testing.assert_array_equal(microbatch["experts"][0, :3], experts[:3])
    assert (microbatch["experts"][0, 3:] == -1).all() and (microbatch["experts"][1] == -1).all()
    filled = pack([unknown], rows=2, sequence_length=6, columns=(column,))
    assert jax.tree.structure(filled) == jax.tree.structure(batch)  # one program for both
    assert (filled["experts"] == -1).all()
    shapes = microbatch_shapes((column,), rows=2, sequence_length=6)
    assert {name: (x.shape, x.dtype) for name, x in shapes.items()} == {
        name: (values.shape, values.dtype) for name, values in microbatch.columns.items()
    }


def test_a_number_holds_for_the_whole_document_whatever_it_is_of():
    columns = tuple(Column(of, "float32", 0.0, of=of) for of in ("input", "target", "document"))
    documents = [
        Document(
            tokens=np.arange(3, dtype=np.int32),
            loss_weights=np.ones(3, np.float32),
            columns=dict.fromkeys(("input", "target", "document"), value),
        )
        for value in (0.5, 2.0)
    ]
    batch = pack(documents, rows=1, sequence_length=5, columns=columns)
    for column in columns:
        assert batch[column.name].tolist() == [[[0.5, 0.5, 2.0, 2.0, 0.0]]]


def test_a_column_that_is_not_declared_is_not_in_the_batch():
    """So a batch of supervised training is the five standard columns, whatever its documents know."""
    batch = pack(documents_of([5]), rows=1, sequence_length=4, columns=NextToken().columns)
    assert list(batch.columns) == ["tokens", "targets", "loss_weights", "segment_ids", "positions"]
    assert batch.get("versions") is None
    for name, dtype in STANDARD.items():
        assert batch[name].shape == (1, 1, 4) and batch[name].dtype == dtype


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        (Column("x", "int16", -1, of="input", shape=(2, 3)), np.zeros((4, 1, 3)), r"(4, 1, 3), expected"),
        (Column("x", "int16", -1, of="input", shape=(2, 3)), 1.0, r"(), expected"),
        (Column("x", "float32", 0, of="target"), np.zeros(3), r"(3,), expected"),
        (Column("x", "float32", 0, of="document"), np.zeros(4), r"(4,), expected one number"),
    ],
)
def test_a_column_of_another_shape_than_declared_is_named(column, values, expected):
    tokens, weights = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    document = Document(tokens=tokens, loss_weights=weights, columns={"x": values})
    with pytest.raises(
        PackingError, match=re.escape(f"column x of a document of 4 tokens has shape {expected}")
    ):
        pack([document], rows=2, sequence_length=6, columns=(column,))
