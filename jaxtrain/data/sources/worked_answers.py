"""Documents from an environment's worked answers: the prompt as the fleet sends it, then the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtrain.config.errors import ConfigError
from jaxtrain.data.packing import Document
from jaxtrain.data.sources.base import SourceTools
from rollout_bridge.rollouts.environments.base import Environment
from rollout_bridge.rollouts.transcript import prompt_ids

HELD_OUT = 100_000  # tasks; each is read before the first step


@dataclass(frozen=True, kw_only=True)
class WorkedAnswers:
    """Loss on the answer and its end-of-sequence token only.

    environment: options in place of the config's, for answers to other tasks than those of RL. Tasks with the
    messages of a held-out one of the config's environment are left out.

    Raises `ConfigError` for an environment that states no answers.
    """

    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> frozenset[str]:
        return frozenset()

    def open(self, tools: SourceTools) -> WorkedDocuments:
        environment = tools.environment()
        held_out = environment.held_out
        if held_out is environment or held_out.size > HELD_OUT:
            raise ConfigError(
                [
                    f"environment: held_out of {type(environment).__name__} has {held_out.size} tasks"
                    f"{', those of training' if held_out is environment else ''}; expected an environment of "
                    f"its own with at most {HELD_OUT}"
                ]
            )
        return WorkedDocuments(
            tools.environment(**self.environment),
            tools.tokenizer,
            held_out=frozenset(_key(held_out.task(index).messages) for index in range(held_out.size)),
        )


class WorkedDocuments:
    """By task index. held_out: contents of the messages of tasks that are left out."""

    def __init__(
        self, environment: Environment, tokenizer: Any, *, held_out: frozenset[tuple[str, ...]] = frozenset()
    ) -> None:
        answer = getattr(environment, "worked_answer", None)
        if answer is None:
            raise ConfigError(
                [
                    f"environment {type(environment).__name__} states no worked answers: set "
                    "warm_start.steps to 0, or name another source"
                ]
            )
        self._environment, self._tokenizer = environment, tokenizer
        self._answer, self._held_out = answer, held_out

    def __len__(self) -> int:
        return self._environment.size

    def __getitem__(self, index: int) -> Document | None:
        task = self._environment.task(index)
        if _key(task.messages) in self._held_out:
            return None
        prompt = prompt_ids(self._tokenizer, task)
        _, text = self._answer(index)
        answer = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Document(
            tokens=np.asarray([*prompt, *answer], np.int32),
            loss_weights=np.asarray([0.0] * len(prompt) + [1.0] * len(answer), np.float32),
        )


def _key(messages: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    return tuple(message["content"] for message in messages)
