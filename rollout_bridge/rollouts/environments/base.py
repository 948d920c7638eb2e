"""What a rollout worker needs of an environment: tasks by index, and a score for the text that came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_bridge.errors import ExpectedError
from rollout_bridge.trajectories.schema import Status


class EnvironmentConfigError(ExpectedError, ValueError):
    """An environment cannot be built as configured; the message names the option, its value and the
    remedy.
    """


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt.

    index: its index in the split; name: what the trajectory's `task` column says.
    messages: chat messages ({"role", "content"}) for the tokenizer's template.
    data: whatever the environment needs to score an answer; never shown to the policy.
    """

    index: int
    name: str
    messages: tuple[dict[str, str], ...]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What an answer was worth.

    components: reward components by name; total: the reward trained on, in [0, 1].
    status: `OK`, or why there is no reward (then total is 0); `MALFORMED` is the policy's fault and is
        trained on.
    detail: what went wrong, for the trajectory's metadata.
    """

    components: dict[str, float]
    total: float
    status: Status = Status.OK
    detail: str = ""


class Environment(Protocol):
    """Tasks of one split. Pure: the same index is the same task in every process of the run."""

    @property
    def size(self) -> int:
        """Number of tasks; task indices are [0, size)."""
        ...

    @property
    def held_out(self) -> Environment:
        """The tasks evaluations are made of: no question of theirs is in this split."""
        ...

    def task(self, index: int) -> Task:
        """The task at `index`. Raises `IndexError` outside [0, size)."""
        ...

    def score(self, task: Task, text: str) -> Score:
        """The score of `text`. Called from threads. What fails here is a status, not an exception."""
        ...
