"""Supervised documents from an environment's worked answers.

A document is the prompt as the fleet sends it, then the answer.
Order is Grain's seeded shuffle, repeated; the position in it is the only state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grain.python as grain
import numpy as np

from jaxtrain.data.batch import Batch
from jaxtrain.data.packing import Document, best_fit, pack
from rollout_bridge.rollouts.transcript import prompt_ids


class Tasks(Protocol):
    """Tasks by index, as an `Environment` has them."""

    @property
    def size(self) -> int: ...

    def task(self, index: int) -> Any: ...


class WorkedEnvironment(Tasks, Protocol):
    """An environment that also states answers."""

    def worked_answer(self, index: int) -> tuple[str, str]: ...


@dataclass(frozen=True)
class Supervised:
    """One batch and the position after it."""

    batch: Batch
    position: int


class WorkedAnswers:
    """Batches of worked answers; pure in `position`, so a resumed run reads what an uninterrupted one would.

    tokenizer: a Hugging Face tokenizer with a chat template.
    held_out: tasks whose messages are skipped, for an environment whose own split does not see to it.

    Raises `ValueError` for an environment that states no answers.
    """

    def __init__(
        self, environment: WorkedEnvironment, tokenizer: Any, *, seed: int, held_out: Tasks | None = None
    ) -> None:
        if not hasattr(environment, "worked_answer"):
            raise ValueError(
                f"environment {type(environment).__name__} states no worked answers: "
                "set warm_start.steps to 0"
            )
        self._environment, self._tokenizer = environment, tokenizer
        count = 0 if held_out is None else held_out.size
        self._held_out = {_key(held_out.task(i).messages) for i in range(count)} if held_out else set()
        self._order = grain.MapDataset.range(environment.size).seed(seed).shuffle().repeat()

    def document(self, index: int) -> Document:
        """Training task `index`: loss on the answer and its end-of-sequence token only."""
        prompt = prompt_ids(self._tokenizer, self._environment.task(index))
        _, text = self._environment.worked_answer(index)
        answer = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Document(
            tokens=np.asarray([*prompt, *answer], np.int32),
            loss_weights=np.asarray([0.0] * len(prompt) + [1.0] * len(answer), np.float32),
        )

    def batch(self, position: int, *, microbatches: int, rows: int, sequence_length: int) -> Supervised:
        """As many documents from `position` on as fit in `microbatches` of [rows, sequence_length]."""
        documents: list[Document] = []
        ends: list[int] = []  # position after each document
        capacity = microbatches * rows * sequence_length
        used, at = 0, position
        while used < capacity:
            index = int(self._order[at])
            at += 1
            if _key(self._environment.task(index).messages) in self._held_out:
                continue
            documents.append(self.document(index))
            ends.append(at)
            used += len(documents[-1].tokens) - 1
        while len(documents) > 1 and _rows(documents, sequence_length) > microbatches * rows:
            documents.pop()
        return Supervised(
            batch=pack(documents, rows=rows, sequence_length=sequence_length),
            position=ends[len(documents) - 1],
        )


def _rows(documents: Sequence[Document], sequence_length: int) -> int:
    return len(best_fit([len(d.tokens) - 1 for d in documents], sequence_length))


def _key(messages: Sequence[dict[str, str]]) -> tuple[str, ...]:
    return tuple(message["content"] for message in messages)
