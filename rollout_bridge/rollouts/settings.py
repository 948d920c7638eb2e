"""The settings of a worker. They have no defaults: those are in the config's schema."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_bridge.errors import ExpectedError
from rollout_bridge.rollouts.transcript import Limits


class WorkerError(ExpectedError, RuntimeError):
    """A worker must end; the message names what it waited for and the remedy."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker samples, and its timeouts. All times are in seconds.

    run_seed: of all sampling seeds of the run. group_size: episodes of each prompt (GRPO's G).
    limits: of one training episode.
    temperature: of training episodes; 0 is greedy.
    stop_ids: tokens that end a turn; empty: the tokenizer's end-of-sequence token.
    task_tries: of a task that cannot be read or an episode that fails, before it is recorded as failed.
    max_concurrent_groups: groups generated at once; they fill the engine's batch.
    claim_groups: prompt indices claimed at a time. lease_seconds: of a claim, renewed at a third of it.
    segment_groups, flush_seconds: a segment is written at that many groups, or that long after the first.
    generate_timeout_seconds: of one call of the engine. abort_retries: of a turn that the engine aborted.
    engine_timeout_seconds: how long an engine may fail or be unready before the worker gives up.
    idle_timeout_seconds: how long a worker may have nothing to do. poll_seconds: between reads of the store.
    """

    run_seed: int
    group_size: int
    limits: Limits
    temperature: float
    stop_ids: tuple[int, ...]
    task_tries: int
    max_concurrent_groups: int
    claim_groups: int
    lease_seconds: float
    segment_groups: int
    flush_seconds: float
    generate_timeout_seconds: float
    abort_retries: int
    engine_timeout_seconds: float
    idle_timeout_seconds: float
    poll_seconds: float

    def __post_init__(self) -> None:
        for name in ("group_size", "task_tries", "max_concurrent_groups", "claim_groups", "segment_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollouts.{name}: {getattr(self, name)} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"rollouts.temperature: {self.temperature} is negative; 0 is greedy")
