"""vLLM 0.32's `/inference/v1/generate`: a `Request` to its JSON body, its answer to a `Completion`.

The endpoint takes and gives token ids and exists only with `--enable-scale-out`. Log-probabilities are those
of the sampling distribution only with `--logprobs-mode processed_logprobs`. A log-probability of -9999 stands
for NaN or minus infinity.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_bridge.engines.protocol import (
    Completion,
    EngineError,
    FinishReason,
    KvPolicy,
    Request,
    VersionSpan,
)

logger = logging.getLogger(__name__)

NOT_A_LOGPROB = -9999.0
UNVERSIONED = "default"
"""What a fresh server calls its weights."""


def generate_payload(request: Request, *, cache_salt: str | None) -> dict[str, Any]:
    """JSON body for one request.

    Stops at `stop_ids` and nothing else, whatever the model's own end-of-sequence token is. `logprobs: 0`
    asks for the sampled token's alone. cache_salt: prompts share cached prefixes only under the same salt.
    """
    payload: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": [int(token) for token in request.prompt_ids],
        "sampling_params": {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop_token_ids": [int(token) for token in request.stop_ids],
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
        "stream": False,
    }
    if cache_salt is not None:
        payload["cache_salt"] = cache_salt
    return payload


def parse_version(label: str) -> int | None:
    """The policy version in a weight label; None for a server that was given none."""
    if label == UNVERSIONED:
        return None
    if not label.isdecimal():
        raise EngineError(
            f"vLLM: weight version {label!r} is not a policy version; something else updates this server's "
            "weights. Restart it from a materialised directory"
        )
    return int(label)


def cached_prompt_tokens(response: Mapping[str, Any]) -> int:
    """Prompt tokens whose KV came from the prefix cache (with `--enable-prompt-tokens-details`)."""
    details = (response.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def parse_completion(
    request: Request,
    response: Mapping[str, Any],
    *,
    kv_policy: KvPolicy,
    seconds: float,
    moe_layers: Sequence[int] | None,
) -> Completion:
    """A `Completion` from the response. Raises `EngineError` for anything the contract does not allow."""
    choice = response["choices"][0]
    token_ids = np.asarray(choice["token_ids"] or [], dtype=np.int32)
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = np.asarray([entry["logprob"] for entry in content], dtype=np.float32)
    where = f"vLLM: completion of request {request.request_id!r}"
    if len(logprobs) != len(token_ids) or [e["token_id"] for e in content] != token_ids.tolist():
        raise EngineError(f"{where}: {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    if len(logprobs) and not (np.isfinite(logprobs) & (logprobs > NOT_A_LOGPROB)).all():
        raise EngineError(
            f"{where}: a sampled token has no finite log-probability: the weights or the activations are not "
            "finite. Nothing of it may be trained on; compare the mirror's digests with the manifest"
        )
    try:
        reason = FinishReason(choice["finish_reason"])
    except ValueError as error:
        raise EngineError(f"{where}: finish reason {choice['finish_reason']!r}") from error
    completion = Completion(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=_spans(choice.get("weight_versions") or [], len(token_ids), where),
        finish_reason=reason,
        kv_policy=kv_policy,
        seconds=seconds,
        routed_experts=_routed_experts(
            choice.get("routed_experts"), len(request.prompt_ids) + len(token_ids), moe_layers
        ),
    )
    return completion if request.exact_version is None else only_version(completion, request.exact_version)


def only_version(completion: Completion, version: int) -> Completion:
    """The completion if all its tokens are of `version`, else its leading tokens that are, aborted."""
    first = completion.spans[0] if completion.spans else VersionSpan(version, 0, 0)
    if all(span.version == version for span in completion.spans):
        return completion
    kept = first.end if first.version == version else 0
    experts = completion.routed_experts
    prompt = 0 if experts is None else len(experts) - len(completion.token_ids)
    return replace(
        completion,
        token_ids=completion.token_ids[:kept],
        logprobs=completion.logprobs[:kept],
        spans=(first,) if kept else (),
        finish_reason=FinishReason.ABORT,
        routed_experts=None if experts is None else experts[: prompt + kept],
    )


def aborted(request: Request, *, kv_policy: KvPolicy, seconds: float) -> Completion:
    """A completion without tokens, for a request that can no longer be served at its exact version."""
    return Completion(
        request_id=request.request_id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        spans=(),
        finish_reason=FinishReason.ABORT,
        kv_policy=kv_policy,
        seconds=seconds,
    )


def _spans(raw: Sequence[Mapping[str, Any]], tokens: int, where: str) -> tuple[VersionSpan, ...]:
    spans = []
    for entry in raw:
        version = parse_version(entry["version"])
        if version is None:
            raise EngineError(
                f"{where}: tokens from weights without a version; the server was not started by its agent, "
                "which sets the version before admitting requests"
            )
        spans.append(VersionSpan(version, int(entry["start"]), int(entry["end"])))
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != tokens:
        raise EngineError(f"{where}: version spans {spans} do not cover its {tokens} tokens")
    return tuple(spans)


def _routed_experts(encoded: str | None, tokens: int, moe_layers: Sequence[int] | None) -> np.ndarray | None:
    """int16 [prompt + T, MoE layers, k] of the server's base64 .npy [prompt + T - 1, all layers, k].

    The last token was never an input, and dense layers have rows too. None for another shape: rows of a
    part of the tokens do not say of which.
    """
    if encoded is None or moe_layers is None:
        return None
    rows = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if rows.ndim != 3 or len(rows) != tokens - 1 or rows.shape[1] <= max(moe_layers, default=-1):
        logger.warning(
            "vLLM sent routed experts %s, expected [%d, at least %d layers, k]; they are left out",
            list(rows.shape),
            tokens - 1,
            max(moe_layers, default=-1) + 1,
        )
        return None
    experts = np.full((tokens, len(moe_layers), rows.shape[2]), -1, dtype=np.int16)
    experts[: len(rows)] = rows[:, list(moe_layers)]
    return experts
