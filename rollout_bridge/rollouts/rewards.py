"""Helpers for rewards: reading an answer out of a text, and a reward function by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from rollout_bridge.references import known, resolve
from rollout_bridge.rollouts.environments.base import Answer, Task

GROUP = "jaxtrain.rewards"
Reward = Callable[[Task, Answer], float | Mapping[str, float]]


def tagged_answer(text: str, tag: str) -> str | None:
    """The stripped text between the last <tag> and the </tag> after it; None if there is no such pair."""
    _, opened, rest = text.rpartition(f"<{tag}>")
    answer, closed, _ = rest.partition(f"</{tag}>")
    return answer.strip() if opened and closed else None


def registered() -> list[str]:
    """Reward functions that installed packages register."""
    return sorted(known(group=GROUP, builtin={}))


def reward_function(reference: str) -> Reward:
    """The function that an environment's `reward` option names, `module:function` or an entry point.

    It takes a task and an answer, and returns a number, or components by name whose sum is the reward.
    Raises `UnknownReference`, and `ValueError` for something that cannot be called.
    """
    found: Any = resolve(reference, group=GROUP, builtin={}, kind="reward")
    if not callable(found):
        raise ValueError(f"reward: {reference!r} is {found!r}, expected a function of a task and an answer")
    return cast(Reward, found)
