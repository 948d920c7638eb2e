"""Batches of documents by index: shuffled by a seed, repeated without end, packed whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain

from jaxtrain.data.packing import Document, pack
from jaxtrain.data.sources.base import Batches, BatchSpec, Documents, Packed
from rollout_bridge.trajectories.packing import PackingError, best_fit


class PackedDocuments(grain.IterDataset[Packed]):
    """State: {"position": in the shuffled order, "tokens": valid tokens handed out}.

    Pure in its state, so a resumed run reads what an uninterrupted one would.
    """

    def __init__(self, documents: Documents, *, seed: int, spec: BatchSpec) -> None:
        super().__init__()
        if not len(documents):
            raise PackingError(f"{type(documents).__name__} holds no document; nothing can be trained on")
        self.documents, self.spec = documents, spec
        self.order = grain.MapDataset.range(len(documents)).seed(seed).shuffle().repeat()

    def __iter__(self) -> _Iterator:
        return _Iterator(self)


def packed(documents: Documents, *, seed: int, spec: BatchSpec) -> Batches:
    return PackedDocuments(documents, seed=seed, spec=spec)


class _Iterator(grain.DatasetIterator[Packed]):
    def __init__(self, dataset: PackedDocuments) -> None:
        super().__init__()
        self._dataset = dataset
        self._position = self._tokens = 0

    def __next__(self) -> Packed:
        """As many documents from the position on as fit in the batch."""
        documents, spec = self._dataset.documents, self._dataset.spec
        shape = spec.shape_at(self._tokens)
        taken: list[Document] = []
        ends: list[int] = []  # position after each document
        used, at, empty = 0, self._position, 0
        while used < shape.positions:
            index = self._dataset.order[at]
            assert index is not None  # a shuffled range has a value everywhere
            document = documents[int(index)]
            at += 1
            if document is None or len(document.tokens) < 2:  # a single token predicts nothing
                empty += 1
                if empty > len(documents) and not taken:
                    raise PackingError(
                        f"{type(documents).__name__}: none of its {len(documents)} indices has a document to "
                        "train on; are all of them held out?"
                    )
                continue
            taken.append(document)
            ends.append(at)
            used += len(document.tokens) - 1
        while len(taken) > 1 and _rows(taken, shape.sequence_length) > shape.microbatches * shape.rows:
            taken.pop()
        batch = pack(taken, rows=shape.rows, sequence_length=shape.sequence_length, columns=spec.columns)
        self._position = ends[len(taken) - 1]
        self._tokens += batch.valid_tokens()
        return Packed(batch)

    def get_state(self) -> dict[str, Any]:
        return {"position": self._position, "tokens": self._tokens}

    def set_state(self, state: dict[str, Any]) -> None:
        self._position, self._tokens = int(state["position"]), int(state["tokens"])


def _rows(documents: Sequence[Document], sequence_length: int) -> int:
    return len(best_fit([len(d.tokens) - 1 for d in documents], sequence_length))
