"""A copying environment, importable by scoring processes: what a verifier does wrong is in its answers."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

from rollout_bridge.rollouts.environments.base import Answer, Score, Task
from rollout_bridge.rollouts.episode import single_turn
from rollout_bridge.rollouts.rewards import tagged_answer
from rollout_bridge.trajectories.schema import Status


@dataclass(frozen=True)
class Options:
    """size: tasks. prefix: of their texts; suffix: of the one at index 0. broken: texts whose verifier
    raises. hanging: texts whose verifier hangs on a wrong answer. unreadable: indices without a task.
    unloadable: the environment cannot be built in a scoring process.
    """

    size: int = 40
    prefix: str = "t"
    suffix: str = ""
    broken: tuple[str, ...] = ()
    hanging: tuple[str, ...] = ()
    unreadable: tuple[int, ...] = ()
    unloadable: bool = False


DEFAULTS = Options()


class CopyEnvironment:
    """The right answer to "t3" is "t3"; the reward is the fraction of matching characters."""

    Options = Options
    episode = staticmethod(single_turn)

    def __init__(self, options: Options = DEFAULTS, *, seed: int = 0) -> None:
        if options.unloadable and "rollout_bridge.rollouts.scoring_process" in sys.orig_argv:
            raise ValueError("size: cannot be had here")
        self.options, self.size = options, options.size

    @property
    def held_out(self) -> CopyEnvironment:
        return CopyEnvironment(Options(size=6, prefix="h"))

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(index)
        if index in self.options.unreadable:
            raise RuntimeError("no such question")
        text = f"{self.options.prefix}{index}" + ("" if index else self.options.suffix)
        return Task(
            index=index, name="copy", messages=({"role": "user", "content": text},), data={"text": text}
        )

    def score(self, task: Task, answer: Answer) -> Score:
        text, wanted = answer.text, task.data["text"]
        if wanted in self.options.broken:
            raise RuntimeError("the verifier is broken")
        if wanted in self.options.hanging and text != wanted:
            time.sleep(10_000)
        if not text:
            return Score(components={}, total=0.0, status=Status.MALFORMED)
        right = sum(a == b for a, b in zip(wanted, text, strict=False)) / max(len(wanted), len(text))
        return Score(components={"correct": right, "exact": float(right == 1)}, total=right)


class Misbehaving(CopyEnvironment):
    """Does what the answer says."""

    def score(self, task: Task, answer: Answer):  # type: ignore[override]
        match answer.text:
            case "hang":
                time.sleep(10_000)
            case "hold the GIL":
                return __import__("re").match("(a+)+$", "a" * 40 + "b") == "a" * 40
            case "exit":
                sys.exit(3)
            case "die":
                os._exit(3)
            case "allocate":
                return float(len([bytearray(1 << 24) for _ in range(1 << 10)]))
            case "print":
                print("{}" * 10_000, flush=True)
            case "connect":
                socket.create_connection(("127.0.0.1", 9))
            case "run code":  # as libraries do that evaluate an answer
                return float(eval(task.data["code"]))
            case "keep notes":
                with tempfile.TemporaryFile() as file:
                    return float(file.write(b"x"))
            case "read secrets":
                return float(
                    len([name for name in os.environ if name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY")])
                )
            case "not a number":
                return float("nan")
            case "text":
                return "good"  # type: ignore[return-value]
            case "parts":
                return {"style": 0.25, "length": 0.5}
        return 1.0

    def process(self) -> int:
        return os.getpid()

    def interject(self, begin: str, done: str) -> None:
        """Returns; once the file `begin` is there, writes bytes of its own to the pool and makes `done`."""

        def write() -> None:
            while not os.path.exists(begin):
                time.sleep(0.01)
            os.write(int(sys.argv[1]), b"\0\0")
            open(done, "x").close()

        threading.Thread(target=write, daemon=True).start()

    def large(self) -> str:
        return "x" * (9 << 20)


class TwoTurns(CopyEnvironment):
    """The policy copies the prompt, is shown "7", and copies what it then sees; the last answer is scored."""

    async def episode(self, task, policy, limits):  # type: ignore[override]
        transcript = policy.begin(task, limits)
        await policy.turn(transcript)
        while not transcript.finished and len(transcript.completions) < 2:
            text = await policy.call("tool", transcript.answer.text)
            transcript.append_messages({"role": "user", "content": text})
            await policy.turn(transcript)
        return [transcript.end(await policy.score(task, transcript))]

    def tool(self, text: str) -> str:
        if tagged_answer(text, "raise"):
            raise RuntimeError(text)
        return str(len(text))

    def score(self, task: Task, answer: Answer) -> float:  # type: ignore[override]
        return float(len(answer.turns))


class Endless(CopyEnvironment):
    """Its episodes begin, take a turn and then wait for ever."""

    async def episode(self, task, policy, limits):  # type: ignore[override]
        await policy.turn(policy.begin(task, limits))
        await asyncio.Event().wait()


class Raising(CopyEnvironment):
    """Its episodes raise for a while, by task: always for 0, once for 1."""

    def __init__(self, options: Options = DEFAULTS, *, seed: int = 0) -> None:
        super().__init__(options, seed=seed)
        self.tried: dict[int, int] = {}

    async def episode(self, task, policy, limits):  # type: ignore[override]
        self.tried[task.index] = self.tried.get(task.index, 0) + 1
        if task.index == 0 or (task.index == 1 and self.tried[1] == 1):
            raise RuntimeError("the environment is broken")
        return await single_turn(task, policy, limits)
