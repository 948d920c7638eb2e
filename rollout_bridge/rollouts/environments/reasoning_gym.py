"""Any dataset of the reasoning-gym library as an environment: procedural questions with a verifier.

A dataset draws question `i` from seed + i, and different indices may draw the same question. The index
space is therefore cut into a held-out region and a training region, and a training task whose question is a
held-out one is redrawn from elsewhere in the training region, so that neither an index nor a question is
ever in both splits.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from rollout_bridge.rollouts.environments.base import EnvironmentConfigError, Score, Task
from rollout_bridge.rollouts.rewards import tagged_answer
from rollout_bridge.trajectories.schema import Status

logger = logging.getLogger(__name__)

# Draws before a training question counts as unobtainable: where half of all draws collide, one task in 2^64
# fails.
DRAWS = 64
# Draws a held-out task may cost on average before its questions count as not distinct enough.
HELD_OUT_DRAWS = 8
REWARDS = ("correct", "exact")


class ReasoningGym:
    """Training split; `held_out` is the other one.

    dataset, options: name and configuration of a reasoning-gym dataset; seed: of all its questions.
    train_size, held_out_size: number of tasks in each split. Questions of the held-out split are distinct. A
        few datasets (acre, for one) make all their questions when built: keep train_size small for those.
    system_prompt: put before every question if not empty.
    answer_tag: if not empty, only the text between the last <tag> and </tag> is scored; an answer without
        them is `MALFORMED` with reward 0.
    reward: which component is trained on: "correct" (the dataset's own score, often with partial credit) or
        "exact" (1 iff that score is 1).

    Raises `EnvironmentConfigError`.
    """

    def __init__(
        self,
        *,
        dataset: str,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        train_size: int = 100_000,
        held_out_size: int = 256,
        system_prompt: str = "",
        answer_tag: str = "",
        reward: str = "correct",
    ) -> None:
        if reward not in REWARDS:
            raise EnvironmentConfigError(
                f"reasoning_gym: reward {reward!r} is not one of {', '.join(REWARDS)}"
            )
        if train_size < 1 or held_out_size < 0:
            raise EnvironmentConfigError(
                f"reasoning_gym: train_size {train_size} must be at least 1 and held_out_size "
                f"{held_out_size} at least 0"
            )
        self.name = f"reasoning_gym/{dataset}"
        self.size = train_size
        self._held_out_size = held_out_size
        self._system_prompt = system_prompt
        self._answer_tag = answer_tag
        self._reward = reward
        self._train_start = held_out_size * HELD_OUT_DRAWS
        self._dataset = _create(dataset, dict(options or {}), seed=seed, size=self._train_start + train_size)

    @cached_property
    def held_out_indices(self) -> tuple[int, ...]:
        """Dataset indices of the held-out tasks: the first of each distinct question."""
        return tuple(self._held_out_questions.values())

    @cached_property
    def _held_out_questions(self) -> dict[str, int]:
        questions: dict[str, int] = {}
        for index in range(self._train_start):
            if len(questions) == self._held_out_size:
                return questions
            questions.setdefault(self._dataset[index]["question"], index)
        if len(questions) < self._held_out_size:
            raise EnvironmentConfigError(
                f"{self.name}: held_out_size {self._held_out_size} asks for more distinct questions than the "
                f"{len(questions)} found in {self._train_start} draws; lower it or widen the "
                "dataset's options"
            )
        return questions

    @cached_property
    def held_out(self) -> HeldOut:
        return HeldOut(self)

    def dataset_index(self, index: int) -> int:
        """Index in the reasoning-gym dataset of training task `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"{self.name}: task {index} is not in [0, {self.size})")
        stride = max(1, int(self.size * 0.618))  # far from the neighbours, which are other tasks
        for draw in range(DRAWS):
            candidate = self._train_start + (index + draw * stride) % self.size
            if self._dataset[candidate]["question"] not in self._held_out_questions:
                return candidate
        raise EnvironmentConfigError(
            f"{self.name}: all {DRAWS} draws of training task {index} are held-out questions; "
            f"lower held_out_size ({self._held_out_size}) or widen the dataset's options"
        )

    def task(self, index: int) -> Task:
        return self.task_at(index, self.dataset_index(index))

    def task_at(self, index: int, dataset_index: int) -> Task:
        """Task `index` of a split whose question is the dataset's at `dataset_index`."""
        entry = self._dataset[dataset_index]
        system = ({"role": "system", "content": self._system_prompt},) if self._system_prompt else ()
        return Task(
            index=index,
            name=self.name,
            messages=(*system, {"role": "user", "content": entry["question"]}),
            data={"entry": entry},
        )

    def worked_answer(self, index: int) -> tuple[str, str]:
        """Question and a correct answer of training task `index`, for a warm start; tagged as scoring wants
        it.

        Raises `EnvironmentConfigError` where the dataset states no answer (a few only verify).
        """
        task = self.task(index)
        entry = task.data["entry"]
        answer = str(entry["answer"])
        if self._answer_tag:
            answer = f"<{self._answer_tag}>{answer}</{self._answer_tag}>"
        if self.score(task, answer).components.get("exact") != 1.0:
            raise EnvironmentConfigError(
                f"{self.name}: task {index} states {answer!r}, which its own verifier refuses; "
                "warm-start from another dataset, or from recorded answers"
            )
        return entry["question"], answer

    def score(self, task: Task, text: str) -> Score:
        """Components "correct" (the dataset's score) and "exact" (1 iff that is 1).

        A scorer that raises, or returns something outside [0, 1], is an environment failure: the policy is
        not blamed for it.
        """
        answer = text.strip()
        if self._answer_tag:
            tagged = tagged_answer(text, self._answer_tag)
            if tagged is None:
                return Score(
                    components={"correct": 0.0, "exact": 0.0},
                    total=0.0,
                    status=Status.MALFORMED,
                    detail=f"no <{self._answer_tag}> ... </{self._answer_tag}> in the answer",
                )
            answer = tagged
        try:
            correct = float(self._dataset.score_answer(answer, task.data["entry"]))
        except Exception as error:  # any verifier bug is the environment's failure, reported in the row
            logger.warning(
                "%s: scoring task %d raised %s: %s", self.name, task.index, type(error).__name__, error
            )
            return _failure(f"{type(error).__name__}: {error}")
        if not (math.isfinite(correct) and -1e-6 <= correct <= 1 + 1e-6):
            return _failure(f"score {correct} is not in [0, 1]")
        components = {"correct": min(max(correct, 0.0), 1.0), "exact": float(correct >= 1 - 1e-6)}
        return Score(components=components, total=components[self._reward])


class HeldOut:
    """The held-out split of a `ReasoningGym`."""

    def __init__(self, train: ReasoningGym) -> None:
        self._train = train
        self.size = len(train.held_out_indices)

    @property
    def held_out(self) -> HeldOut:
        return self

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(f"{self._train.name}: held-out task {index} is not in [0, {self.size})")
        return self._train.task_at(index, self._train.held_out_indices[index])

    def score(self, task: Task, text: str) -> Score:
        return self._train.score(task, text)


def _failure(detail: str) -> Score:
    return Score(components={}, total=0.0, status=Status.ENVIRONMENT_FAILURE, detail=detail)


def _create(name: str, options: dict[str, Any], *, seed: int, size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a library it brings, at its first import
        import reasoning_gym  # more than a second to import, and needed only on hosts that score with it
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise EnvironmentConfigError(
            f"reasoning_gym: dataset {name!r} is unknown; known ones: {', '.join(sorted(DATASETS))}"
        )
    for reserved in ("seed", "size"):
        if reserved in options:
            raise EnvironmentConfigError(
                f"reasoning_gym: {reserved!r} does not go in the dataset's options; "
                f"use {'seed' if reserved == 'seed' else 'train_size and held_out_size'} beside them"
            )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise EnvironmentConfigError(
            f"reasoning_gym: dataset {name!r} refuses options {options!r}: {error}"
        ) from error
