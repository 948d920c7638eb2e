"""The tokens of one episode, appended and never tokenised again: from a prompt to a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollout_bridge.engines.protocol import Completion, FinishReason, Purpose
from rollout_bridge.rollouts.environments.base import Answer, Score, Task
from rollout_bridge.trajectories.schema import Status, Trajectory, Turn, TurnKind, group_id

# Messages before those of an environment when their tokens are computed.
_BEFORE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used; the same files serve trainer and fleet."""

    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


class TranscriptError(ValueError):
    """Tokens that cannot be appended; the message has the remedy."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one episode.

    tokens: in all, prompt and environment tokens included. answer_tokens: generated in one turn. turns: of
    the policy. seconds: wall time, tools included; past it the trajectory's status is `TIMEOUT`.
    """

    tokens: int
    answer_tokens: int
    turns: int
    seconds: float

    def __post_init__(self) -> None:
        if min(self.tokens, self.answer_tokens, self.turns) < 1:
            raise ValueError(f"rollouts: tokens, answer_tokens and turns of {self} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a trajectory comes from, for its columns."""

    prompt_index: int
    member: int
    engine: str
    worker: str
    temperature: float
    purpose: Purpose


def prompt_ids(tokenizer: Tokenizer, task: Task) -> list[int]:
    """Token ids of the task's messages in the tokenizer's chat template, ready for the assistant's turn."""
    return _template(tokenizer, task.messages, add_generation_prompt=True)


def message_ids(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, stop_ids: Sequence[int]
) -> list[int]:
    """Token ids of an environment's messages after a turn of the policy, ready for its next turn.

    The chat template renders a short conversation without and with the messages; the difference is returned.
    If the template ends the assistant's message with a stop token, it starts after that token, because the
    policy has written one itself.

    Raises `TranscriptError` for a template that renders earlier messages differently when others follow.
    """
    before = _template(tokenizer, _BEFORE)
    after = _template(tokenizer, (*_BEFORE, *messages), add_generation_prompt=True)
    if after[: len(before)] != before:
        raise TranscriptError(
            "the tokenizer's chat template changes earlier turns when messages are appended; append the "
            "tokens themselves with transcript.append_tokens"
        )
    stops = [position for position, token in enumerate(before) if token in set(stop_ids)]
    return after[stops[-1] + 1 if stops else len(before) :]


def answer_text(
    tokenizer: Tokenizer, token_ids: Sequence[int] | np.ndarray, *, stop_ids: Sequence[int]
) -> str:
    """What was generated, special tokens included, without the token that ended it."""
    tokens = [int(token) for token in token_ids]
    if tokens and tokens[-1] in stop_ids:
        tokens.pop()
    return tokenizer.decode(tokens, skip_special_tokens=False)


@dataclass(kw_only=True)
class Transcript:
    """One episode so far. Lists have one item a token; turns follow one another and cover them.

    seed: of the first turn. experts: int16 [tokens, MoE layers, k] of the tokens that engines have reported.
    full: an environment's tokens would have left no room for an answer, and were not appended.
    """

    tokenizer: Tokenizer
    limits: Limits
    stop_ids: tuple[int, ...]
    origin: Origin
    task_name: str
    token_ids: list[int] = field(default_factory=list)
    trainable: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    seed: int = 0
    experts: np.ndarray | None = None
    full: bool = False

    @property
    def room(self) -> int:
        """Tokens that the next turn may have."""
        return max(0, min(self.limits.answer_tokens, self.limits.tokens - len(self.token_ids)))

    @property
    def finished(self) -> bool:
        """No further turn is possible: the last was cut off, or the tokens or the turns are used up."""
        cut = bool(self.completions) and self.completions[-1].finish_reason is not FinishReason.STOP
        return cut or self.full or self.room == 0 or len(self.completions) >= self.limits.turns

    @property
    def answer(self) -> Answer:
        """The policy's text so far."""
        texts = tuple(
            answer_text(self.tokenizer, completion.token_ids, stop_ids=self.stop_ids)
            for completion in self.completions
        )
        return Answer(
            text=texts[-1] if texts else "",
            turns=texts,
            ended=bool(texts) and self.completions[-1].finish_reason is FinishReason.STOP,
            tokens=sum(self.trainable),
        )

    def append_completion(self, completion: Completion) -> None:
        """A turn of the policy: trainable, with its log-probabilities and versions."""
        start = len(self.token_ids)
        self._append(completion.token_ids, TurnKind.MODEL)
        self.logprobs[start:] = map(float, completion.logprobs)
        for span in completion.spans:
            self.versions[start + span.start : start + span.end] = [span.version] * (span.end - span.start)
        self.completions.append(completion)
        found = completion.routed_experts
        if found is not None:
            known = self.experts
            if known is not None:  # the first report of a token is kept
                found = found.copy()
                found[: len(known)] = np.where(known >= 0, known, found[: len(known)])
            self.experts = found

    def append_messages(self, *messages: Mapping[str, Any]) -> None:
        """A turn of the environment in the chat template, up to the start of the policy's next turn.

        Without room for them and one more token, nothing is appended and the transcript is finished.
        """
        self.append_tokens(message_ids(self.tokenizer, messages, stop_ids=self.stop_ids))

    def append_tokens(self, token_ids: Sequence[int], kind: TurnKind = TurnKind.TOOL) -> None:
        """A turn of the environment as tokens: not trainable, log-probability 0, version -1.

        Without room for them and one more token, nothing is appended and the transcript is finished.
        """
        if len(self.token_ids) + len(token_ids) >= self.limits.tokens:
            self.full = True
        else:
            self._append(token_ids, kind)

    def end(self, score: Score) -> Trajectory:
        """The trajectory with its score. Its time of creation is set where it is written."""
        tokens, origin = len(self.token_ids), self.origin
        experts = self.experts
        if experts is not None and len(experts) < tokens:
            unknown = np.full((tokens - len(experts), *experts.shape[1:]), -1, np.int16)
            experts = np.concatenate([experts, unknown])
        last = self.completions[-1] if self.completions else None
        return Trajectory(
            trajectory_id=f"{group_id(origin.prompt_index)}/{origin.member}",
            group_id=group_id(origin.prompt_index),
            prompt_index=origin.prompt_index,
            member=origin.member,
            task=self.task_name,
            token_ids=np.asarray(self.token_ids, np.int32),
            trainable=np.asarray(self.trainable, bool),
            behavior_logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            turns=tuple(self.turns),
            temperature=float(origin.temperature),
            seed=self.seed,
            max_tokens=self.limits.answer_tokens,
            finish_reason=(last.finish_reason if last else FinishReason.ABORT).value,
            kv_policy=last.kv_policy.value if last else "",
            status=score.status,
            reward=float(score.total),
            rewards={name: float(value) for name, value in score.components.items()},
            engine=origin.engine,
            worker=origin.worker,
            created_at=0.0,
            generate_seconds=float(sum(completion.seconds for completion in self.completions)),
            purpose=origin.purpose.value,
            routed_experts=experts,
            metadata={"detail": score.detail} if score.detail else {},
        )

    def _append(self, token_ids: Sequence[int] | np.ndarray, kind: TurnKind) -> None:
        start, count = len(self.token_ids), len(token_ids)
        self.token_ids += [int(token) for token in token_ids]
        self.trainable += [kind is TurnKind.MODEL] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count
        if count:
            self.turns.append(Turn(kind, start, start + count))


def failed(transcript: Transcript, detail: str, status: Status) -> Trajectory:
    """The trajectory of an episode that failed: what was generated so far, never trained on.

    A row of the log has a token: a transcript without any gets a stop token in place of its prompt.
    """
    if not transcript.token_ids:
        transcript._append(transcript.stop_ids[:1], TurnKind.PROMPT)
    return transcript.end(Score(components={}, total=0.0, status=status, detail=detail))


def _template(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=True, return_dict=False, **options
    )
    return [int(token) for token in ids]
