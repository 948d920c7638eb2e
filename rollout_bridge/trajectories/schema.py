"""Contract 4: one trajectory, and its row in a segment.

A segment is an immutable Parquet file (zstd) of whole groups. Columns are the fields of `Trajectory`; ragged
arrays are lists. `routed_experts` is flat, with its shape beside it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

SCHEMA_VERSION = 1


class Status(enum.StrEnum):
    """What became of the episode in its environment."""

    OK = "ok"
    ENVIRONMENT_FAILURE = "environment_failure"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"


class TurnKind(enum.StrEnum):
    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"


def group_id(prompt_index: int) -> str:
    return f"{prompt_index:08d}"


@dataclass(frozen=True)
class Turn:
    """Tokens [start, end) of the trajectory and who wrote them."""

    kind: TurnKind
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode. T tokens, prompt included.

    trajectory_id: "<group_id>/<member>"; group_id: "<prompt_index:08d>"; unique in a run's training log.
    token_ids: int32 [T].
    trainable: bool [T], True on tokens the policy sampled.
    behavior_logprobs: float32 [T], 0 where not trainable.
    versions: int32 [T], policy version that produced each token, -1 where not trainable.
    temperature, seed, max_tokens: sampling parameters (temperature 0 is greedy).
    rewards: components by name; `reward` is the one trained on.
    routed_experts: int16 [T, MoE layers, k] or None.
    created_at: unix seconds; generate_seconds: wall time in the engine.
    """

    trajectory_id: str
    group_id: str
    prompt_index: int
    member: int
    task: str
    token_ids: np.ndarray
    trainable: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    turns: tuple[Turn, ...]
    temperature: float
    seed: int
    max_tokens: int
    finish_reason: str
    kv_policy: str
    status: Status
    reward: float
    rewards: dict[str, float]
    engine: str
    worker: str
    created_at: float
    generate_seconds: float
    purpose: str = "train"
    routed_experts: np.ndarray | None = None
    metadata: dict[str, str] = field(default_factory=dict)
