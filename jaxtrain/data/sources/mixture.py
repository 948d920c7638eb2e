"""Documents of several sources, mixed by global index: no buffer of a source exists anywhere."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import grain
import numpy as np

from jaxtrain.config.base import Reference
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.references import build
from jaxtrain.data.packing import Document
from jaxtrain.data.sources.base import Documents, Source, SourceTools, documents_at
from rollout_bridge.trajectories.packing import PackingError

SAMPLE = 256  # documents of a part whose mean length turns a share of tokens into one of documents


@dataclass(frozen=True, kw_only=True)
class Part:
    """source: name and options. weight: its share of the tokens is in proportion to it. epochs: passes over
    it while the other parts make theirs.
    """

    source: Mapping[str, Any]
    weight: float | None = None
    epochs: float | None = None


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """parts: by name; the names are in the metrics. All have a weight, or all have epochs."""

    parts: Mapping[str, Part]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(
                "parts: empty; name sources, such as {code: {weight: 2, source: {name: text, ...}}}"
            )
        for kind in ("weight", "epochs"):
            values = {name: getattr(part, kind) for name, part in self.parts.items()}
            for name, value in values.items():
                if value is not None and value <= 0:
                    raise ValueError(f"parts.{name}.{kind}: {value} is not above 0; leave the part out")
            if kind == "weight" and len({value is None for value in values.values()}) > 1:
                lacking = next(name for name, value in values.items() if value is None)
                raise ValueError(
                    f"parts.{lacking}: no weight, which others have; give all one, or all epochs"
                )
        for name, part in self.parts.items():
            if (part.weight is None) == (part.epochs is None):
                raise ValueError(f"parts.{name}: give weight or epochs, one of them")
        self.sources()

    def sources(self) -> dict[str, Source]:
        """Raises `ValueError` for a source that is unknown or options that do not fit."""
        try:
            return {
                name: build(
                    "source", Reference.model_validate(dict(part.source)), where=f"parts.{name}.source"
                )
                for name, part in self.parts.items()
            }
        except ConfigError as error:
            raise ValueError("; ".join(error.problems)) from error

    @property
    def columns(self) -> frozenset[str]:
        """Those that every part has."""
        return frozenset.intersection(*(source.columns for source in self.sources().values()))

    def open(self, tools: SourceTools) -> Documents:
        opened = {name: source.open(tools) for name, source in self.sources().items()}
        if empty := [name for name, documents in opened.items() if not len(documents)]:
            raise PackingError(f"parts.{empty[0]}: holds no document; leave it out, or name other files")
        return MixedDocuments(opened, self.parts)


class MixedDocuments:
    """Documents of all parts, one part after the other; `order` mixes them."""

    def __init__(self, documents: Mapping[str, Documents], parts: Mapping[str, Part]) -> None:
        self._names, self._documents = list(documents), list(documents.values())
        self._ends = list(accumulate(map(len, self._documents)))
        self._parts = [parts[name] for name in self._names]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sequence[Document]:
        part = bisect.bisect_right(self._ends, index)
        found = documents_at(self._documents[part], index - (self._ends[part - 1] if part else 0))
        return [replace(document, source=self._names[part]) for document in found]

    def order(self, seed: int) -> grain.MapDataset[int]:
        """Indices without end. Each part is shuffled anew in each of its epochs."""
        shuffled, shares = [], []
        for number, (part, documents, end) in enumerate(
            zip(self._parts, self._documents, self._ends, strict=True)
        ):
            size = len(documents)
            indices = grain.MapDataset.range(end - size, end).seed(seed + number).shuffle().repeat()
            shuffled.append(indices)
            if part.epochs is not None:
                shares.append(size * part.epochs)  # documents, and so tokens
            else:
                assert part.weight is not None
                shares.append(part.weight / self._mean_tokens(number, seed))
        return grain.MapDataset.mix(shuffled, weights=shares)

    def _mean_tokens(self, part: int, seed: int) -> float:
        """Tokens at an index, of a sample chosen by the seed."""
        documents = self._documents[part]
        chosen = np.random.default_rng([seed, part]).choice(
            len(documents), min(SAMPLE, len(documents)), replace=False
        )
        tokens = [sum(len(d.tokens) for d in documents_at(documents, int(index))) for index in chosen]
        if not sum(tokens):
            raise PackingError(f"parts.{self._names[part]}: none of {len(tokens)} indices has a document")
        return float(np.mean(tokens))
