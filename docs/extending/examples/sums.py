"""Sums of two numbers, with a reward for the right answer and a small price for each token."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollout_bridge.rollouts.environments.base import Answer, Task
from rollout_bridge.rollouts.episode import single_turn


@dataclass(frozen=True)
class Options:
    """largest: number added. prompts, held_out_prompts: tasks of each split. price: of one token."""

    largest: int = 99
    prompts: int = 1000
    held_out_prompts: int = 50
    price: float = 0.01

    def __post_init__(self) -> None:
        if self.largest < 10:
            raise ValueError(f"largest: {self.largest} leaves too few sums; expected at least 10")


class Sums:
    Options = Options
    episode = staticmethod(single_turn)

    def __init__(self, options: Options, *, seed: int, split: int = 0):
        self.options, self.seed, self.split = options, seed, split
        self.size = options.held_out_prompts if split else options.prompts

    @property
    def held_out(self) -> Sums:
        return Sums(self.options, seed=self.seed, split=1)

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(f"task {index} is not in [0, {self.size})")
        draw = random.Random(f"{self.seed}/{self.split}/{index}")
        a, b = draw.randint(0, self.options.largest), draw.randint(0, self.options.largest - 1)
        b += (a + b) % 2 != self.split  # no question is in both splits: odd sums are held out
        messages = ({"role": "user", "content": f"What is {a} + {b}? Answer with the number alone."},)
        return Task(index=index, name="sums", messages=messages, data={"sum": a + b})

    def worked_answer(self, index: int) -> tuple[str, str]:
        task = self.task(index)
        return task.messages[0]["content"], str(task.data["sum"])

    def score(self, task: Task, answer: Answer) -> dict[str, float]:
        right = answer.text.strip() == str(task.data["sum"])
        return {"right": float(right), "length": -self.options.price * answer.tokens}
