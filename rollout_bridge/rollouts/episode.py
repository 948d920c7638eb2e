"""An episode: what an environment uses to make one, and how a failed one is recorded.

`Policy` is an engine bound to one episode: token ids in, token ids out. `single_turn` is the shortest
episode, and the `episode` of every environment that asks one question and scores the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_bridge.engines.protocol import Completion, FinishReason, Request
from rollout_bridge.rollouts.environments.base import Environment, Score, Task
from rollout_bridge.rollouts.generation import EngineCaller, NoAnswer, generate
from rollout_bridge.rollouts.scoring import CallFailed, ScoringError, ScoringPool
from rollout_bridge.rollouts.settings import WorkerError
from rollout_bridge.rollouts.transcript import (
    Limits,
    Origin,
    Tokenizer,
    Transcript,
    TranscriptError,
    failed,
    prompt_ids,
)
from rollout_bridge.trajectories.schema import Status, Trajectory, TurnKind, group_id

logger = logging.getLogger(__name__)


class EpisodeFailed(Exception):
    """This episode cannot be scored, and another try would not change that."""


class Aborted(EpisodeFailed):
    """The engine aborted every attempt at a turn."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one episode is sampled.

    seed: of turn t, try n. request_id: of the first turn; later turns add their number.
    exact_version: the one that every token must come from, None for any.
    abort_retries: of an aborted turn, None for no limit but the deadline (monotonic seconds).
    """

    request_id: str
    seed: Callable[[int, int], int]
    stop_ids: tuple[int, ...]
    exact_version: int | None = None
    abort_retries: int | None
    deadline: float = float("inf")


class Policy:
    """The policy in one episode, with the tokenizer and the processes that the episode may use."""

    def __init__(
        self,
        caller: EngineCaller,
        tokenizer: Tokenizer,
        processes: ScoringPool,
        sampling: Sampling,
        origin: Origin,
    ) -> None:
        self.tokenizer = tokenizer
        self._caller, self._processes = caller, processes
        self._sampling, self._origin = sampling, origin
        self._transcript: Transcript | None = None
        self._turns = 0

    def begin(self, task: Task, limits: Limits) -> Transcript:
        """A transcript that starts with the task's messages in the chat template.

        Raises `EpisodeFailed` if they leave no room for an answer.
        """
        transcript = self._transcript = self.transcript(task, limits)
        ids = prompt_ids(self.tokenizer, task)
        if len(ids) >= limits.tokens:
            raise EpisodeFailed(
                f"the prompt has {len(ids)} tokens, expected fewer than batch.sequence_length {limits.tokens}"
            )
        transcript.append_tokens(ids, TurnKind.PROMPT)
        return transcript

    def transcript(self, task: Task, limits: Limits) -> Transcript:
        """An empty transcript, for a prompt that is made of tokens."""
        return Transcript(
            tokenizer=self.tokenizer,
            limits=limits,
            stop_ids=self._sampling.stop_ids,
            origin=self._origin,
            task_name=task.name,
        )

    async def sample(self, token_ids: list[int], *, max_tokens: int) -> tuple[Request, Completion]:
        """A completion of `token_ids`, and its request.

        Raises `Aborted` past the retries, with the completion appended to the transcript begun last.
        """
        sampling, turn = self._sampling, self._turns
        self._turns += 1
        request = Request(
            request_id=sampling.request_id + (f"-{turn}" if turn else ""),
            prompt_ids=list(token_ids),
            max_tokens=max_tokens,
            temperature=self._origin.temperature,
            seed=0,
            stop_ids=sampling.stop_ids,
            purpose=self._origin.purpose,
            exact_version=sampling.exact_version,
            affinity=group_id(self._origin.prompt_index),
        )
        return await generate(
            self._caller,
            request,
            seed=lambda tries: sampling.seed(turn, tries),
            abort_retries=sampling.abort_retries,
            deadline=sampling.deadline,
        )

    async def turn(self, transcript: Transcript) -> None:
        """The policy's next turn, appended. Does nothing to a transcript that is finished.

        Raises `Aborted` when the engine aborted every attempt; the transcript has the tokens of the last.
        """
        if transcript.finished:
            return
        request, completion = await self.sample(transcript.token_ids, max_tokens=transcript.room)
        if not transcript.completions:
            transcript.seed = request.seed
        transcript.append_completion(completion)
        if completion.finish_reason is FinishReason.ABORT:
            raise Aborted("the engine aborted every attempt")

    async def call(self, method: str, *arguments: Any) -> Any:
        """`method` of the environment, run in a process that can be killed; its result must be JSON.

        Code that reads or runs the policy's text belongs there. Raises `CallFailed`; if the environment does
        not catch it, the episode ends with the status of the call.
        """
        return await self._processes.call(method, *arguments)

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """The environment's score of what the policy wrote, computed in a process that can be killed."""
        return await self._processes.score(task, transcript.answer)

    def failed(self, task: Task, limits: Limits, detail: str, status: Status) -> Trajectory:
        """The trajectory of a failed episode, with what was generated."""
        return failed(self._transcript or self.transcript(task, limits), detail, status)


async def single_turn(task: Task, policy: Policy, limits: Limits) -> list[Trajectory]:
    """One question, one answer, one score."""
    transcript = policy.begin(task, limits)
    await policy.turn(transcript)
    return [transcript.end(await policy.score(task, transcript))]


async def play(
    environment: Environment,
    index: int,
    policies: Sequence[Callable[[int], Policy]],
    limits: Limits,
    *,
    tries: int,
    created_at: Callable[[], float],
) -> list[Trajectory]:
    """One episode of task `index` for each of `policies`, side by side: a whole group, in their order.

    policies: give the policy of the n-th try of an episode. A task that cannot be read, and an episode whose
    environment raises, are tried `tries` times, then recorded as failed. created_at: clock, unix seconds.

    Raises only what ends the worker: `WorkerError`, `ScoringError`.
    """
    task, problem = _task(environment, index, tries)
    if problem:
        rows = [[policy(0).failed(task, limits, problem, Status.ENVIRONMENT_FAILURE)] for policy in policies]
    else:
        try:
            async with asyncio.TaskGroup() as together:
                running = [
                    together.create_task(_episode(environment, task, policy, limits, tries))
                    for policy in policies
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        rows = [episode.result() for episode in running]
    group, now = [row for episode in rows for row in episode], created_at()
    return [
        replace(row, member=member, trajectory_id=f"{row.group_id}/{member}", created_at=now)
        for member, row in enumerate(group)
    ]


def _task(environment: Environment, index: int, tries: int) -> tuple[Task, str]:
    """The task; or one that only has a name, and what was raised."""
    problem = ""
    for _ in range(tries):
        try:
            return environment.task(index), ""
        except Exception as error:
            problem = f"task {index} raises {type(error).__name__}: {error}"
            logger.warning("%s: %s", type(environment).__name__, problem)
    return Task(index=index, name=type(environment).__name__, messages=()), problem


async def _episode(
    environment: Environment, task: Task, policy_of: Callable[[int], Policy], limits: Limits, tries: int
) -> list[Trajectory]:
    for number in range(tries):
        policy = policy_of(number)
        status, last = Status.ENVIRONMENT_FAILURE, number + 1 == tries
        try:
            async with asyncio.timeout(limits.seconds) as time_limit:
                rows = await environment.episode(task, policy, limits)
            if rows:
                return rows
            problem = "the environment's episode has no trajectory"
        except (CallFailed, EpisodeFailed, TranscriptError, NoAnswer) as error:
            problem, last = str(error), True
            status = error.status if isinstance(error, CallFailed) else status
        except (WorkerError, ScoringError):
            raise  # these end the worker
        except TimeoutError as error:
            problem = f"TimeoutError: {error}"
            if time_limit.expired():
                problem, status, last = f"the episode took over {limits.seconds:g} s", Status.TIMEOUT, True
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        logger.warning("%s: task %d, try %d: %s", task.name, task.index, number, problem)
        if last:
            break
    return [policy.failed(task, limits, problem, status)]
