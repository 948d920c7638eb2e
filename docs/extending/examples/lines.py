"""Pretraining on the lines of a text file, then on those of a better one: a data source and a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxtrain.config.base import required
from jaxtrain.config.optimization import SupervisedSection
from jaxtrain.config.references import build
from jaxtrain.config.schema import ExperimentConfig
from jaxtrain.data.packing import Document
from jaxtrain.data.sources.base import SourceTools


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The data source: a document for each line of the file. longest: tokens that are kept of a line."""

    path: str
    longest: int
    columns: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if not Path(self.path).is_file():
            raise ValueError(f"path: {self.path} is no file; name one, from the directory of the command")

    def texts(self) -> list[str]:
        return [line for line in Path(self.path).read_text(encoding="utf-8").splitlines() if line]

    def open(self, tools: SourceTools) -> list[Document]:
        encode, end = tools.tokenizer.encode, tools.tokenizer.eos_token_id
        rows = [np.array([*encode(text), end][: self.longest], np.int32) for text in self.texts()]
        return [Document(tokens=row, loss_weights=np.ones(len(row), np.float32)) for row in rows]


class Pretraining(ExperimentConfig):
    """The recipe. Its own sections, beside those that every recipe has, are its two phases."""

    program: ClassVar[str] = "lines:run"
    plenty: SupervisedSection = required("steps on much text")
    better: SupervisedSection = required("steps on good text, afterwards")


def run(config: Pretraining, run_dir: Path) -> None:
    from jaxtrain.recipes.sft import supervised  # here, so that a config is checked without them
    from jaxtrain.training.loop import run_phase
    from jaxtrain.training.run import open_run

    texts = build("source", config.plenty.source, where="plenty.source").texts
    with open_run(config, run_dir, texts=texts) as opened:
        state, progress = opened.restore_or_initialize()
        for name, later in (("plenty", ("better",)), ("better", ())):
            phase = supervised(opened, name, getattr(config, name), before=later)
            state, progress = run_phase(opened, state, progress, phase)
        opened.save(state, progress, force=True)
