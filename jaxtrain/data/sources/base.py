"""The data of a phase: a Grain dataset of packed batches whose iterator has a JSON state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grain
from grain.experimental import ThreadPrefetchIterDataset

from jaxtrain.data.batch import Batch, Column
from jaxtrain.data.packing import Document
from rollout_bridge.rollouts.environments.base import Environment


@dataclass(frozen=True)
class BatchShape:
    """Microbatches [rows, sequence_length]; how many of them the batch may fill."""

    microbatches: int
    rows: int
    sequence_length: int

    @property
    def positions(self) -> int:
        return self.microbatches * self.rows * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The batches that a phase needs.

    shape_at: the shape of the batch that follows a number of valid tokens of the phase. columns: besides the
    standard ones. steps: of the phase. interrupted: whether a wait for data should end.
    """

    shape_at: Callable[[int], BatchShape]
    columns: tuple[Column, ...]
    steps: int
    interrupted: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Packed:
    """A batch and the metrics of its source."""

    batch: Batch
    metrics: Mapping[str, float] = field(default_factory=dict)


Batches = grain.IterDataset[Packed]
OpenBatches = Callable[[BatchSpec], Batches]


class Documents(Protocol):
    """Documents by index, the same in every process: one, several, or None where there is none.

    May have `order(seed)`, a `grain.MapDataset` of indices without end, in place of a shuffle of all.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document | Sequence[Document] | None: ...


def documents_at(documents: Documents, index: int) -> Sequence[Document]:
    found = documents[index]
    return [found] if isinstance(found, Document) else found or ()


@dataclass(frozen=True)
class SourceTools:
    """Parts of a run for its sources.

    tokenizer: a Hugging Face tokenizer with a chat template. environment: opens the run's environment, with
    options in place of the config's; raises `ConfigError` where the recipe has none.
    """

    tokenizer: Any
    seed: int
    environment: Callable[..., Environment]


class Source(Protocol):
    """A frozen dataclass of its options that opens documents. A new source is a new file."""

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that its documents have besides tokens and loss weights."""
        ...

    def open(self, tools: SourceTools) -> Documents: ...


@contextmanager
def prefetching(
    batches: Batches, state: Mapping[str, Any], halt: threading.Event
) -> Iterator[grain.DatasetIterator[Packed]]:
    """The iterator from `state` on (empty: from the start), read ahead by a thread of Grain's.

    Its state is that of the batches handed out. halt: set at the end, so that a wait for data ends too.
    """
    iterator = ThreadPrefetchIterDataset(batches, prefetch_buffer_size=1).__iter__()
    if state:
        iterator.set_state(dict(state))
    try:
        yield iterator
    finally:
        halt.set()
        iterator.close()
