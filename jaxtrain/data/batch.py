"""A batch is a table of columns, arrays [microbatch, row, sequence, ...] (contract 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

Values = np.ndarray | jax.Array


@dataclass(frozen=True)
class Column:
    """A column that a loss reads besides the standard ones.

    name: in the batch and in the documents. dtype: a numpy name. fill: where there is no document, and in
    documents without the column. of: what a value belongs to: an "input" token, the "target" token that is
    predicted, or the whole "document". shape: axes after the sequence.
    """

    name: str
    dtype: str
    fill: float
    of: Literal["input", "target", "document"]
    shape: tuple[int, ...] = ()


# Every batch has these. Token t of a row predicts `targets[t]` with weight `loss_weights[t]`, 0 where nothing
# is learnt. segment_ids: from 1 in each row, 0 is padding. positions: within the document.
STANDARD = {
    "tokens": "int32",
    "targets": "int32",
    "loss_weights": "float32",
    "segment_ids": "int32",
    "positions": "int32",
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Packed documents: the columns of `STANDARD` as attributes, and those that the loss declared by name."""

    columns: dict[str, Values]

    def __getitem__(self, name: str) -> Values:
        return self.columns[name]

    def get(self, name: str) -> Values | None:
        """The column, None if it was not declared."""
        return self.columns.get(name)

    @property
    def tokens(self) -> Values:
        return self.columns["tokens"]

    @property
    def targets(self) -> Values:
        return self.columns["targets"]

    @property
    def loss_weights(self) -> Values:
        return self.columns["loss_weights"]

    @property
    def segment_ids(self) -> Values:
        return self.columns["segment_ids"]

    @property
    def positions(self) -> Values:
        return self.columns["positions"]

    def valid_tokens(self) -> int:
        """Tokens of documents, loss or not, padding left out; an exact count at any size."""
        return int(np.count_nonzero(self.segment_ids))

    def microbatches(self) -> Iterator[Batch]:
        """Each microbatch alone, arrays [row, sequence, ...]."""
        for index in range(self.tokens.shape[0]):
            yield Batch({name: values[index] for name, values in self.columns.items()})


def microbatch_shapes(
    columns: tuple[Column, ...], *, rows: int, sequence_length: int
) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every column of a microbatch [rows, sequence_length, ...]."""
    shape = (rows, sequence_length)
    return {name: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for name, dtype in STANDARD.items()} | {
        column.name: jax.ShapeDtypeStruct((*shape, *column.shape), np.dtype(column.dtype))
        for column in columns
    }
