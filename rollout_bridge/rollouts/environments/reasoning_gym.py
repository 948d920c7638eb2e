"""Any dataset of the reasoning-gym library as an environment: procedural questions with a verifier.

A dataset draws question `i` from seed + i, and different indices may draw the same question. The index
space is therefore cut into a held-out region and a training region, and a training task whose question is a
held-out one is redrawn from elsewhere in the training region, so that neither an index nor a question is
ever in both splits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rollout_bridge.errors import guess
from rollout_bridge.rollouts.environments.base import (
    Answer,
    EnvironmentConfigError,
    Score,
    Task,
    as_score,
    failure,
)
from rollout_bridge.rollouts.episode import single_turn
from rollout_bridge.rollouts.rewards import registered, reward_function, tagged_answer
from rollout_bridge.trajectories.schema import Status

# Draws until a training question counts as unobtainable: if half of all draws collide, one task in 2^64
# fails.
DRAWS = 64
# Draws a held-out task may cost on average before its questions count as not distinct enough.
HELD_OUT_DRAWS = 8
REWARDS = ("correct", "exact")


@dataclass(frozen=True, kw_only=True)
class Options:
    """task, options: name and configuration of a reasoning-gym dataset.

    train_prompts, held_out_prompts: tasks in each split; more than a short run consumes, so that none
        repeats. A few datasets (acre, for one) make all their questions when built: keep train_prompts small
        for those.
    system_prompt: first message of every conversation, if there is one.
    answer_tag: only the text between the last <tag> and </tag> is scored; an answer without them is
        `MALFORMED` with reward 0. None scores the whole answer.
    reward: trained on: "correct" (the dataset's own score, often with partial credit), "exact" (1 iff that is
        1), or a function of (task, answer) as module:function.
    """

    task: str = "spell_backward"
    options: Mapping[str, Any] = field(default_factory=dict)
    train_prompts: int = 20_000
    held_out_prompts: int = 200
    system_prompt: str | None = None
    answer_tag: str | None = None
    reward: str = "correct"

    def __post_init__(self) -> None:
        if self.train_prompts < 1:
            raise ValueError(f"train_prompts: {self.train_prompts} is not in [1, inf)")
        if self.held_out_prompts < 0:
            raise ValueError(f"held_out_prompts: {self.held_out_prompts} is not in [0, inf)")
        if self.reward not in REWARDS and ":" not in self.reward and self.reward not in registered():
            names = ", ".join([*REWARDS, *registered()])
            raise ValueError(f"reward: {self.reward!r} is not one of {names}, and no module:function")
        for reserved, instead in (("seed", "the config's seed"), ("size", "train_prompts, held_out_prompts")):
            if reserved in self.options:
                raise ValueError(f"options.{reserved}: does not go here; it comes from {instead}")


class ReasoningGym:
    """Training split; `held_out` is the other one, whose questions are distinct.

    seed: of all questions. Raises `EnvironmentConfigError`, which begins with the option's name.
    """

    Options = Options
    episode = staticmethod(single_turn)

    def __init__(self, options: Options, *, seed: int) -> None:
        self.options = options
        self.name = f"reasoning_gym/{options.task}"
        self.size = options.train_prompts
        self._reward = None if options.reward in REWARDS else reward_function(options.reward)
        if self._reward is None:
            self.reward_range = (0.0, 1.0)
        self._train_start = options.held_out_prompts * HELD_OUT_DRAWS
        self._dataset = _create(
            options.task, dict(options.options), seed=seed, size=self._train_start + self.size
        )

    @cached_property
    def held_out_indices(self) -> tuple[int, ...]:
        """Dataset indices of the held-out tasks: the first of each distinct question."""
        return tuple(self._held_out_questions.values())

    @cached_property
    def _held_out_questions(self) -> dict[str, int]:
        wanted, questions = self.options.held_out_prompts, dict[str, int]()
        for index in range(self._train_start):
            if len(questions) == wanted:
                return questions
            questions.setdefault(self._dataset[index]["question"], index)
        if len(questions) < wanted:
            raise EnvironmentConfigError(
                f"held_out_prompts: {wanted} asks for more distinct questions of {self.name} than the "
                f"{len(questions)} found in {self._train_start} draws; lower it, or widen the dataset's "
                "options"
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
            f"held_out_prompts: all {DRAWS} draws of training task {index} of {self.name} are held-out "
            f"questions; lower {self.options.held_out_prompts}, or widen the dataset's options"
        )

    def task(self, index: int) -> Task:
        return self.task_at(index, self.dataset_index(index))

    def task_at(self, index: int, dataset_index: int) -> Task:
        """Task `index` of a split whose question is the dataset's at `dataset_index`."""
        entry = self._dataset[dataset_index]
        prompt = self.options.system_prompt
        system = ({"role": "system", "content": prompt},) if prompt else ()
        return Task(
            index=index,
            name=self.name,
            messages=(*system, {"role": "user", "content": entry["question"]}),
            data={"entry": entry},
        )

    def worked_answer(self, index: int) -> tuple[str, str]:
        """Question and a correct answer of training task `index`, for a warm start, in the answer's tags.

        Raises `EnvironmentConfigError` where the dataset has no answers (a few only verify).
        """
        task = self.task(index)
        entry = task.data["entry"]
        answer = str(entry["answer"])
        tag = self.options.answer_tag
        if tag:
            answer = f"<{tag}>{answer}</{tag}>"
        if self._verified(task, answer, ended=True).components.get("exact") != 1.0:
            raise EnvironmentConfigError(
                f"{self.name}: task {index} states {answer!r}, which its own verifier rejects; "
                "warm-start from another dataset, or from recorded answers"
            )
        return entry["question"], answer

    def score(self, task: Task, answer: Answer) -> Score:
        """Components "correct" (the dataset's score), "exact" (1 iff that is 1 and the answer ended), and a
        reward function's.
        """
        verified = self._verified(task, answer.text, ended=answer.ended)
        if self._reward is None or verified.status is Status.ENVIRONMENT_FAILURE:
            return verified
        own = as_score(self._reward(task, answer))
        if own.status is Status.ENVIRONMENT_FAILURE:
            return own
        return Score(components=verified.components | own.components, total=own.total)

    def _verified(self, task: Task, text: str, *, ended: bool) -> Score:
        """The dataset's own score; one outside [0, 1] is an environment failure."""
        answer, tag = text.strip(), self.options.answer_tag
        if tag:
            tagged = tagged_answer(text, tag)
            if tagged is None:
                return Score(
                    components={"correct": 0.0, "exact": 0.0},
                    total=0.0,
                    status=Status.MALFORMED,
                    detail=f"no <{tag}> ... </{tag}> in the answer",
                )
            answer = tagged
        correct = float(self._dataset.score_answer(answer, task.data["entry"]))
        if not (math.isfinite(correct) and -1e-6 <= correct <= 1 + 1e-6):
            return failure(f"score {correct} is not in [0, 1]")
        # Partial credit may add up to a hair below 1, junk after the answer included.
        exact = ended and correct >= 1.0
        components = {"correct": min(max(correct, 0.0), 1.0), "exact": float(exact)}
        return Score(components=components, total=components.get(self.options.reward, 0.0))


class HeldOut:
    """The held-out split of a `ReasoningGym`."""

    episode = staticmethod(single_turn)

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

    def score(self, task: Task, answer: Answer) -> Score:
        return self._train.score(task, answer)


def _create(name: str, options: dict[str, Any], *, seed: int, size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of one of its libraries, at the first import
        import reasoning_gym  # more than a second to import, and needed only on hosts that score with it
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise EnvironmentConfigError(
            f"task: {name!r} is none of the {len(DATASETS)} datasets of reasoning-gym"
            f"{guess(name, DATASETS) or '; its README lists them'}"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise EnvironmentConfigError(f"options: {name} refuses {options!r}: {error}") from error
