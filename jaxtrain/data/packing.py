"""Packing of whole documents into fixed rows, and rows into microbatches.

Pure and global: the same documents in the same order give the same batch in every process. Documents are
never cut. A document longer than a row is an error: its source must shorten or skip it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxtrain.data.batch import STANDARD, Batch, Column
from rollout_bridge.trajectories.packing import PackingError, best_fit, positions


@dataclass(frozen=True, kw_only=True)
class Document:
    """T tokens, at least one.

    tokens int32 [T]. loss_weights float32 [T]: `loss_weights[t]` weighs the prediction *of* token t; that of
    the first is never used. columns: more that a loss reads, by name: [T, ...], indexed as `tokens`, or one
    number for the whole document. origin: where it comes from, such as file:line, for
    errors. source: its part of a mixture.
    """

    tokens: np.ndarray
    loss_weights: np.ndarray
    columns: Mapping[str, np.ndarray | float] = field(default_factory=dict)
    origin: str = ""
    source: str = ""


def pack(
    documents: Sequence[Document], *, rows: int, sequence_length: int, columns: Sequence[Column] = ()
) -> Batch:
    """Packs into as many microbatches of [rows, sequence_length] as needed, the last padded with empty rows.

    columns: that the batch has besides the standard ones; others of the documents are left out. A row holds
    sequence_length predictions, so a document of T tokens takes T - 1 positions.

    Raises `PackingError` for a document longer than a row, or a column of another shape than declared.
    """
    bins = best_fit([positions(len(d.tokens)) for d in documents], sequence_length)
    return pack_rows(documents, bins, rows=rows, sequence_length=sequence_length, columns=columns)


def pack_rows(
    documents: Sequence[Document],
    bins: Sequence[Sequence[int]],
    *,
    rows: int,
    sequence_length: int,
    columns: Sequence[Column] = (),
) -> Batch:
    """As `pack`, with the documents of each row given by index."""
    microbatches = max(-(-len(bins) // rows), 1)
    shape = (microbatches * rows, sequence_length)
    arrays: dict[str, np.ndarray] = {name: np.zeros(shape, dtype) for name, dtype in STANDARD.items()}
    for column in columns:
        arrays[column.name] = np.full((*shape, *column.shape), column.fill, column.dtype)
    for row, members in enumerate(bins):
        start = 0
        for segment, index in enumerate(members, start=1):
            start = _place(arrays, row, start, segment, documents[index], columns)
    return Batch({k: v.reshape(microbatches, rows, *v.shape[1:]) for k, v in arrays.items()})


def _place(
    arrays: dict[str, np.ndarray],
    row: int,
    start: int,
    segment: int,
    document: Document,
    columns: Sequence[Column],
) -> int:
    size = len(document.tokens) - 1
    if size < 1:
        return start
    at = (row, slice(start, start + size))
    arrays["tokens"][at] = document.tokens[:-1]
    arrays["targets"][at] = document.tokens[1:]
    arrays["segment_ids"][at] = segment
    arrays["positions"][at] = np.arange(size)
    arrays["loss_weights"][at] = document.loss_weights[1:]
    for column in columns:
        if column.name in document.columns:
            arrays[column.name][at] = _values(column, document)
    return start + size


def _values(column: Column, document: Document) -> np.ndarray:
    """One value a prediction, [T - 1, ...], or one for all of them."""
    values, tokens = np.asarray(document.columns[column.name]), len(document.tokens)
    if values.ndim == 0 and not column.shape:
        return values
    if column.of == "document" or values.shape != (tokens, *column.shape):
        expected = "one number" if column.of == "document" else f"[{tokens}, {column.shape}]"
        raise PackingError(
            f"column {column.name} of a document of {tokens} tokens has shape {values.shape}, expected "
            f"{expected}: the source and the loss that declares it disagree"
        )
    return values[:-1] if column.of == "input" else values[1:]
