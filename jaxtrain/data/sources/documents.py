"""Batches of documents by index: shuffled by a seed, repeated without end, packed by best fit.

More documents are read than a batch holds. Those that do not fit are carried to the next batch. So rows are
nearly full, and every document comes exactly once an epoch.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import grain
import numpy as np

from jaxtrain.data.packing import Document, pack_rows
from jaxtrain.data.sources.base import Batches, BatchSpec, Documents, Packed, documents_at
from rollout_bridge.trajectories.packing import PackingError, positions
from rollout_bridge.waiting import Interrupted

TooLong = Literal["refuse", "skip", "split"]
SURPLUS = 1 / 8  # positions read beyond a batch, as a fraction of it: 99% full on log-normal lengths


class PackedDocuments(grain.IterDataset[Packed]):
    """State: {"position": in the shuffled order, "carried": [position, piece, row length when read] of what
    was read and not yet handed out, "tokens": valid tokens handed out}.

    too_long: what happens to a document longer than a row. Pure in its state, so a resumed run reads what an
    uninterrupted one would.
    """

    def __init__(
        self, documents: Documents, *, seed: int, spec: BatchSpec, too_long: TooLong = "refuse"
    ) -> None:
        super().__init__()
        if not len(documents):
            raise PackingError(f"{type(documents).__name__} holds no document; nothing can be trained on")
        self.documents, self.spec, self.too_long = documents, spec, too_long
        self._split_seed = seed
        order = getattr(documents, "order", None)
        self.order = (
            grain.MapDataset.range(len(documents)).seed(seed).shuffle().repeat()
            if order is None
            else order(seed)
        )

    def __iter__(self) -> _Iterator:
        return _Iterator(self)

    def pieces(self, position: int, sequence_length: int) -> tuple[list[Document], int]:
        """What to train on at a position of the order, and how many documents were left out there."""
        index = self.order[position]
        assert index is not None  # a shuffled range has a value everywhere
        kept: list[Document] = []
        skipped = 0
        for document in documents_at(self.documents, int(index)):
            if positions(len(document.tokens)) <= sequence_length:
                kept += [document] if len(document.tokens) > 1 else []  # a single token predicts nothing
            elif self.too_long == "split":
                kept += _split(document, sequence_length, np.random.default_rng([self._split_seed, position]))
            elif self.too_long == "skip":
                skipped += 1
            else:
                raise PackingError(
                    f"{document.origin or f'document {index}'} has {len(document.tokens)} tokens, more than "
                    f"batch.sequence_length {sequence_length} holds: raise it, or set too_long to skip or "
                    "split"
                )
        return kept, skipped


def packed(documents: Documents, *, seed: int, spec: BatchSpec, too_long: TooLong = "refuse") -> Batches:
    return PackedDocuments(documents, seed=seed, spec=spec, too_long=too_long)


class _Iterator(grain.DatasetIterator[Packed]):
    def __init__(self, dataset: PackedDocuments) -> None:
        super().__init__()
        self._dataset = dataset
        self._position = self._tokens = 0
        self._carried: dict[tuple[int, int, int], Document] = {}  # in the order they were read

    def __next__(self) -> Packed:
        dataset, spec = self._dataset, self._dataset.spec
        shape = spec.shape_at(self._tokens)
        rows, length = shape.microbatches * shape.rows, shape.sequence_length
        wanted = shape.positions + int(SURPLUS * shape.positions) + length
        read = dict(self._carried)
        total = sum(positions(len(document.tokens)) for document in read.values())
        at, skipped, since = self._position, 0, 0
        while total < wanted:
            if spec.interrupted():
                raise Interrupted
            pieces, left_out = dataset.pieces(at, length)
            read |= {(at, number, length): piece for number, piece in enumerate(pieces)}
            total += sum(positions(len(piece.tokens)) for piece in pieces)
            skipped += left_out
            at, since = at + 1, 0 if pieces else since + 1
            if since > len(dataset.documents):
                name = type(dataset.documents).__name__
                raise PackingError(
                    f"{name}: none of its {len(dataset.documents)} indices has a document to train on; are "
                    "all of them held out, or longer than batch.sequence_length?"
                )
        keys, documents = list(read), list(read.values())
        chosen = _fill(
            [positions(len(document.tokens)) for document in documents], len(self._carried), rows, length
        )
        batch = pack_rows(documents, chosen, rows=shape.rows, sequence_length=length, columns=spec.columns)
        taken = {keys[index] for row in chosen for index in row}
        self._carried = {key: document for key, document in read.items() if key not in taken}
        self._position = at
        valid = batch.valid_tokens()
        self._tokens += valid
        by_source: Counter[str] = Counter()
        for row in chosen:
            for document in (documents[index] for index in row):
                by_source[document.source] += positions(len(document.tokens))
        return Packed(
            batch,
            {
                "packing_fraction": valid / shape.positions,
                "documents": len(taken),
                "documents_skipped": skipped,
                "epoch": at / len(dataset.documents),
                **{f"tokens_of_{name}": count for name, count in sorted(by_source.items()) if name},
            },
        )

    def get_state(self) -> dict[str, Any]:
        return {"position": self._position, "carried": list(map(list, self._carried)), "tokens": self._tokens}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._position, self._tokens = int(state["position"]), int(state["tokens"])
        self._carried = {}
        pieces: dict[tuple[int, int], Sequence[Document]] = {}
        for position, number, length in state["carried"]:
            if (position, length) not in pieces:
                pieces[position, length], _ = self._dataset.pieces(position, length)
            self._carried[position, number, length] = pieces[position, length][number]


def _fill(lengths: Sequence[int], carried: int, rows: int, capacity: int) -> list[list[int]]:
    """Rows of indices by best fit, longest first: the first `carried` lengths, then the others.

    What fits in no row is left out. More is offered than fits, so short documents fill what long ones leave.
    """
    free = [(capacity, row) for row in range(rows)]  # (space left, row), ascending
    filled: list[list[int]] = [[] for _ in range(rows)]
    for index in sorted(range(len(lengths)), key=lambda i: (i >= carried, -lengths[i], i)):
        at = bisect.bisect_left(free, (lengths[index], -1))
        if at < len(free):
            space, row = free.pop(at)
            filled[row].append(index)
            bisect.insort(free, (space - lengths[index], row))
    return filled


def _split(document: Document, sequence_length: int, random: np.random.Generator) -> Iterator[Document]:
    """Pieces that each fill at most a row; each token but the first is predicted once. The first piece has a
    random length, so that cuts differ from epoch to epoch."""
    tokens = len(document.tokens)
    start, stop = 0, int(random.integers(1, sequence_length + 1)) + 1
    while start < tokens - 1:
        yield replace(
            document,
            tokens=document.tokens[start:stop],
            loss_weights=document.loss_weights[start:stop],
            columns={
                name: values if np.ndim(values) == 0 else np.asarray(values)[start:stop]
                for name, values in document.columns.items()
            },
        )
        start = stop - 1
        stop = min(start + sequence_length + 1, tokens)
