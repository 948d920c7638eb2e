"""One episode of a single turn: from a task to a request, and from what came back to a trajectory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rollout_bridge.engines.protocol import Completion, EngineError, FinishReason, Request
from rollout_bridge.rollouts.environments.base import Score, Task
from rollout_bridge.trajectories.schema import Status, Trajectory, Turn, TurnKind
from rollout_bridge.trajectories.segment import group_id


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used; the same files serve trainer and fleet."""

    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def derive_seed(run_seed: int, prompt_index: int, member: int, attempt: int) -> int:
    """A sampling seed in [0, 2^31), a hash of its four origins."""
    text = f"{run_seed}/{prompt_index}/{member}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


def prompt_ids(tokenizer: Tokenizer, task: Task) -> list[int]:
    """Token ids of the task's messages in the tokenizer's chat template, ready for the assistant's turn."""
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in task.messages],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    return [int(token) for token in ids]


def answer_text(tokenizer: Tokenizer, token_ids: Sequence[int] | np.ndarray) -> str:
    return tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True)


def check_completion(completion: Completion, request: Request, *, engine: str) -> None:
    """Raises `EngineError` unless the completion keeps the contract of `RolloutEngine` for this request."""
    tokens = len(completion.token_ids)

    def expect(condition: bool | np.bool_, message: str) -> None:
        if not condition:
            raise EngineError(f"{engine}: completion of {request.request_id} breaks the contract: {message}")

    expect(completion.request_id == request.request_id, f"it is the one of {completion.request_id}")
    expect(tokens <= request.max_tokens, f"{tokens} tokens, more than max_tokens {request.max_tokens}")
    expect(tokens > 0 or completion.finish_reason is FinishReason.ABORT, "no tokens, and it was not aborted")
    expect(completion.logprobs.shape == (tokens,), f"log-probs have shape {completion.logprobs.shape}")
    expect(np.isfinite(completion.logprobs).all(), "a log-prob is not finite")
    edges = [span.start for span in completion.spans] + [tokens]
    expect(
        edges[0] == 0 and all(span.end == end for span, end in zip(completion.spans, edges[1:], strict=True)),
        f"version spans {completion.spans} do not cover {tokens} tokens",
    )
    expect(
        all(span.version >= 0 for span in completion.spans),
        f"spans {completion.spans} have a negative version",
    )
    if request.exact_version is not None and completion.finish_reason is not FinishReason.ABORT:
        versions = {span.version for span in completion.spans}
        expect(
            versions == {request.exact_version},
            f"versions {versions}, asked for {request.exact_version} exactly",
        )
    experts = completion.routed_experts
    if experts is not None:
        rows = len(request.prompt_ids) + tokens
        expect(
            experts.ndim == 3 and experts.shape[0] == rows,
            f"routed experts {experts.shape}, expected [{rows}, L, k]",
        )


def trajectory(
    *,
    task: Task,
    request: Request,
    completion: Completion,
    score: Score,
    prompt_index: int,
    member: int,
    engine: str,
    worker: str,
    created_at: float,
) -> Trajectory:
    """The trajectory of a checked completion. An aborted one is an environment failure, whatever its
    score.
    """
    prompt, generated = len(request.prompt_ids), len(completion.token_ids)
    aborted = completion.finish_reason is FinishReason.ABORT
    versions = np.full(prompt + generated, -1, np.int32)
    for span in completion.spans:
        versions[prompt + span.start : prompt + span.end] = span.version
    turns = [Turn(TurnKind.PROMPT, 0, prompt)]
    if generated:
        turns.append(Turn(TurnKind.MODEL, prompt, prompt + generated))
    detail = "the engine aborted every attempt" if aborted else score.detail
    return Trajectory(
        trajectory_id=f"{group_id(prompt_index)}/{member}",
        group_id=group_id(prompt_index),
        prompt_index=prompt_index,
        member=member,
        task=task.name,
        token_ids=np.concatenate([np.asarray(request.prompt_ids), completion.token_ids]).astype(np.int32),
        trainable=np.arange(prompt + generated) >= prompt,
        behavior_logprobs=np.concatenate([np.zeros(prompt), completion.logprobs]).astype(np.float32),
        versions=versions,
        turns=tuple(turns),
        temperature=float(request.temperature),
        seed=request.seed,
        max_tokens=request.max_tokens,
        finish_reason=completion.finish_reason.value,
        kv_policy=completion.kv_policy.value,
        status=Status.ENVIRONMENT_FAILURE if aborted else score.status,
        reward=0.0 if aborted else float(score.total),
        rewards={} if aborted else {name: float(value) for name, value in score.components.items()},
        engine=engine,
        worker=worker,
        created_at=created_at,
        generate_seconds=float(completion.seconds),
        purpose=request.purpose.value,
        routed_experts=completion.routed_experts,
        metadata={"detail": detail} if detail else {},
    )
