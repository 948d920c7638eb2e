"""A question with a calculator: the policy writes an expression, sees its value, and answers."""

from __future__ import annotations

import operator
import random
import re
from dataclasses import dataclass

from rollout_bridge.rollouts.environments.base import Answer, Task
from rollout_bridge.rollouts.episode import Limits, Policy
from rollout_bridge.trajectories.schema import Trajectory

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Options:
    """prompts, held_out_prompts: tasks of each split."""

    prompts: int = 1000
    held_out_prompts: int = 50


class Calculator:
    Options = Options

    def __init__(self, options: Options, *, seed: int, split: int = 0):
        self.options, self.seed, self.split = options, seed, split
        self.size = options.held_out_prompts if split else options.prompts

    @property
    def held_out(self) -> Calculator:
        return Calculator(self.options, seed=self.seed, split=1)

    def task(self, index: int) -> Task:
        draw = random.Random(f"{self.seed}/{index}")
        a, b = draw.randint(100, 999), 2 * draw.randint(50, 499) + self.split  # odd in evaluations only
        messages = ({"role": "user", "content": f"What is {a} times {b}? Use the calculator."},)
        return Task(index=index, name="calculator", messages=messages, data={"answer": a * b})

    async def episode(self, task: Task, policy: Policy, limits: Limits) -> list[Trajectory]:
        transcript = policy.begin(task, limits)
        await policy.turn(transcript)
        if not transcript.finished:
            shown = await policy.call("calculate", transcript.answer.text)
            transcript.append_messages({"role": "user", "content": shown})
            await policy.turn(transcript)
        return [transcript.end(await policy.score(task, transcript))]

    def calculate(self, text: str) -> str:
        found = re.fullmatch(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", text)
        if found is None:
            return "error: write two numbers with +, - or *"
        return str(OPERATORS[found[2]](int(found[1]), int(found[3])))

    def score(self, task: Task, answer: Answer) -> dict[str, float]:
        right = answer.text.strip() == str(task.data["answer"])
        return {"right": float(right), "used": 0.1 * (len(answer.turns) == 2)}
