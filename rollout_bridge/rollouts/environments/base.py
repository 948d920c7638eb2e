"""The protocol of an environment: tasks by index, the loop of an episode, and scores of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rollout_bridge.errors import ExpectedError
from rollout_bridge.trajectories.schema import Status, Trajectory

if TYPE_CHECKING:
    from rollout_bridge.rollouts.episode import Limits, Policy


class EnvironmentConfigError(ExpectedError, ValueError):
    """An environment cannot be built as configured; the message names option, value and remedy."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt.

    index: its index in the split; name: value of the trajectory's `task` column.
    messages: chat messages ({"role", "content"}) for the tokenizer's template.
    data: what the environment needs to score an answer; never shown to the policy, pickled for scoring.
    """

    index: int
    name: str
    messages: tuple[dict[str, str], ...]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The policy's text in one episode.

    text: its last turn, without special tokens; turns: the text of every turn of the policy.
    ended: the last turn ends with a stop token; False where it was cut off. tokens: generated in all turns.
    """

    text: str
    turns: tuple[str, ...]
    ended: bool
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of an answer.

    components: reward components by name; total: the reward trained on.
    status: `OK`, or why there is no reward (then total is 0). A `MALFORMED` answer is trained on.
    detail: what went wrong, for the trajectory's metadata.
    """

    components: dict[str, float]
    total: float
    status: Status = Status.OK
    detail: str = ""


REWARD_RANGE = (-1000.0, 1000.0)  # a reward beyond it is taken for a mistake


class Environment(Protocol):
    """Tasks of one split. Pure: the same index is the same task in every process of the run.

    An environment is built as `Name(options, seed=seed)`. `Name.Options` is a dataclass (see
    `rollout_bridge.options`); without it there are no options. The object of a worker runs episodes. Copies
    in processes that can be killed run `score`, and every method an episode calls with `policy.call`; they
    are built from the same options, and are the training split for held-out tasks too.

    May have `reward_range`, (low, high), which every reward is in; `REWARD_RANGE` without it.
    """

    @property
    def size(self) -> int:
        """Number of tasks; task indices are [0, size)."""
        ...

    @property
    def held_out(self) -> Environment:
        """The tasks of evaluations: none of their questions is in this split."""
        ...

    def task(self, index: int) -> Task:
        """The task at `index`. Raises `IndexError` outside [0, size)."""
        ...

    async def episode(self, task: Task, policy: Policy, limits: Limits) -> list[Trajectory]:
        """One episode of `task`, as trajectories. `episode = staticmethod(single_turn)` for a single turn."""
        ...

    def score(self, task: Task, answer: Answer) -> Score | float | Mapping[str, float]:
        """The reward of an answer: a number, components by name whose sum it is, or a `Score`.

        An exception is recorded as an environment failure.
        """
        ...


def as_score(value: Any) -> Score:
    """The score of a reward function's result; an invalid result is an environment failure."""
    if isinstance(value, Score):
        score = value
    elif isinstance(value, Mapping):
        score = Score(
            components=dict(value), total=math.fsum(value.values()) if _numbers(value) else math.nan
        )
    else:
        score = Score(components={"reward": value}, total=value)
    if _numbers({**score.components, "total": score.total}):
        components = {str(name): float(part) for name, part in score.components.items()}
        return Score(
            components=components, total=float(score.total), status=score.status, detail=score.detail
        )
    return failure(f"the reward is {value!r:.200}, expected finite numbers")


def failure(detail: str, status: Status = Status.ENVIRONMENT_FAILURE) -> Score:
    """The score of an answer that could not be judged."""
    return Score(components={}, total=0.0, status=status, detail=detail)


def _numbers(values: Mapping[str, Any]) -> bool:
    try:
        return all(math.isfinite(value) for value in values.values())
    except TypeError:
        return False
