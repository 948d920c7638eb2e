"""Contract 3: what a rollout engine promises, whether it is vLLM over HTTP or the embedded JAX one.

Token ids in, token ids out, never text. Every generated token has the log-probability it had under the
distribution it was sampled from, and belongs to exactly one version span.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rollout_bridge.errors import ExpectedError
from rollout_bridge.weights.read.update import Update


class Purpose(enum.StrEnum):
    """Why a completion was asked for. Evaluations are logged apart and never trained on."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token was generated (it is the last token)
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the engine gave the request up; the tokens so far are returned


class KvPolicy(enum.StrEnum):
    """What happens to the KV cache of running requests when weights change in flight."""

    KEEP = "keep_kv"
    RECOMPUTE = "recompute_kv"


class UpdateMode(enum.StrEnum):
    """What becomes of running requests when weights change."""

    IN_FLIGHT = "in_flight"  # they stop for the pause and go on with the new weights
    DRAIN = "drain"  # they end with the old weights first; new ones wait
    ABORT = "abort"  # they come back `ABORT`ed with the tokens so far


class EngineError(ExpectedError):
    """An engine failed; the message names the engine, what it was doing, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to generate.

    prompt_ids: token ids of the prompt, at least one.
    max_tokens: largest number of generated tokens, the end-of-sequence token included.
    temperature: 0 is greedy; log-probabilities are then those at temperature 1.
    seed: of this request's sampling; the same request at the same version gives the same tokens.
    exact_version: every token must come from this version, else the completion is `ABORT`ed.
    minimum_version: generation starts only at this version or a later one.
    affinity: requests with the same one share tokens; of several servers, one with their cache serves them.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int
    stop_ids: Sequence[int]
    purpose: Purpose = Purpose.TRAIN
    minimum_version: int | None = None
    exact_version: int | None = None
    affinity: str = ""


@dataclass(frozen=True)
class VersionSpan:
    """Generated tokens [start, end) (0 = first generated token) came from policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What came back for one `Request`.

    token_ids: int32 [T] generated tokens.
    logprobs: float32 [T], log-probability of each under the distribution it was sampled from.
    spans: contiguous, covering [0, T).
    routed_experts: int16 [prompt + T, MoE layers, k], -1 where the engine did not say; None if it has none.
    seconds: from admission to the last token.
    """

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    kv_policy: KvPolicy
    seconds: float
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """How one weight update went. Milliseconds of wall time; `pause_ms` is when no token could be made.

    load_ms: of the pause, what loading and packing took in the slowest worker; 0 where it is not known.
    """

    version: int
    pause_ms: float
    total_ms: float
    tensors: int
    load_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """`ready` engines admit requests; otherwise `reason` says why not and what to do."""

    ready: bool
    version: int | None
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """What workers and sync agents need of an engine. All methods may be called from one event loop."""

    name: str

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests. Raises `EngineError`."""
        ...

    async def update(self, update: Update) -> UpdateReport:
        """Serve the version of `update` from now on. Raises `EngineError`; the engine is then unhealthy."""
        ...

    async def version(self) -> int | None:
        """The version served now, None before the first."""
        ...

    async def health(self) -> Health: ...

    async def close(self) -> None: ...
