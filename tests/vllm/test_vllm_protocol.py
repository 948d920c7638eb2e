"""What a response may say, by hand-made responses in the shape that vLLM 0.32 sends."""

from __future__ import annotations

import asyncio
import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout_bridge.engines.protocol import (
    Completion,
    EngineError,
    FinishReason,
    KvPolicy,
    Request,
    VersionSpan,
)
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_protocol import generate_payload, parse_completion, parse_version

REQUEST = Request(request_id="r", prompt_ids=[5, 6, 7], max_tokens=4, temperature=0.5, seed=9, stop_ids=[2])


def response(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [11, 12, 13, 14],
        "finish_reason": "length",
        "logprobs": {"content": [{"token_id": t, "logprob": -0.1 * t} for t in (11, 12, 13, 14)]},
        "weight_versions": [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 4},
        ],
        "routed_experts": None,
    }
    return {"choices": [choice | changes]}


def parse(
    request: Request = REQUEST, *, moe_layers: tuple[int, ...] | None = None, **changes: Any
) -> Completion:
    return parse_completion(
        request, response(**changes), kv_policy=KvPolicy.KEEP, seconds=1.5, moe_layers=moe_layers
    )


def test_a_completion_has_tokens_logprobs_and_spans_of_the_response() -> None:
    completion = parse()
    assert completion.token_ids.tolist() == [11, 12, 13, 14]
    assert completion.token_ids.dtype == np.int32
    np.testing.assert_allclose(completion.logprobs, [-1.1, -1.2, -1.3, -1.4], rtol=1e-6)
    assert completion.spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 4))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.routed_experts is None


def test_only_the_requests_own_stop_tokens_and_seed_are_sent() -> None:
    payload = generate_payload(REQUEST, cache_salt="4")
    assert payload["token_ids"] == [5, 6, 7]
    assert payload["cache_salt"] == "4"
    assert payload["sampling_params"]["seed"] == 9
    assert payload["sampling_params"]["stop_token_ids"] == [2]
    assert payload["sampling_params"]["ignore_eos"] is True
    assert "cache_salt" not in generate_payload(REQUEST, cache_salt=None)


@pytest.mark.parametrize(
    ("exact", "tokens", "spans"),
    [(3, [11], (VersionSpan(3, 0, 1),)), (4, [], ()), (5, [], ())],
)
def test_an_exact_version_keeps_the_leading_tokens_of_it(
    exact: int, tokens: list[int], spans: tuple[VersionSpan, ...]
) -> None:
    completion = parse(replace(REQUEST, exact_version=exact))
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids.tolist() == tokens
    assert len(completion.logprobs) == len(tokens)
    assert completion.spans == spans


def test_an_exact_version_that_made_every_token_is_untouched() -> None:
    spans = [{"version": "3", "start": 0, "end": 4}]
    completion = parse(replace(REQUEST, exact_version=3), weight_versions=spans)
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 4


def test_routed_experts_are_of_moe_layers_with_minus_one_for_the_token_never_fed_back() -> None:
    rows = np.arange(6 * 3 * 2, dtype=np.uint8).reshape(6, 3, 2)  # 3 + 4 - 1 tokens, 3 layers, top 2
    file = io.BytesIO()
    np.save(file, rows)
    completion = parse(moe_layers=(1, 2), routed_experts=base64.b64encode(file.getvalue()).decode())
    experts = completion.routed_experts
    assert experts is not None
    assert experts.shape == (7, 2, 2)
    assert experts.dtype == np.int16
    np.testing.assert_array_equal(experts[:6], rows[:, 1:])
    assert (experts[6] == -1).all()


@pytest.mark.parametrize("shape", [(3, 3, 2), (7, 3, 2), (9, 3, 2), (6, 2, 2), (6, 3)])
def test_routed_experts_of_other_tokens_or_too_few_layers_are_left_out(shape) -> None:
    """The answer's rows alone would be laid on the prompt; the layers asked for are 1 and 2."""
    file = io.BytesIO()
    np.save(file, np.zeros(shape, np.int16))
    completion = parse(moe_layers=(1, 2), routed_experts=base64.b64encode(file.getvalue()).decode())
    assert completion.routed_experts is None and len(completion.token_ids)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_versions": [{"version": "3", "start": 0, "end": 3}]}, "do not cover its 4 tokens"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 4}]}, "without a version"),
        ({"weight_versions": None}, "do not cover"),
        ({"logprobs": {"content": []}}, "0 log-probabilities for 4 tokens"),
        ({"finish_reason": "error"}, "finish reason 'error'"),
        (
            {"logprobs": {"content": [{"token_id": t, "logprob": -9999.0} for t in (11, 12, 13, 14)]}},
            "no finite log-probability",
        ),
    ],
)
def test_what_the_contract_forbids_is_an_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=f"'r'.*{said}"):
        parse(**changes)


def test_versions() -> None:
    assert parse_version("default") is None
    assert parse_version("12") == 12
    with pytest.raises(EngineError, match="'v12' is not a policy version"):
        parse_version("v12")


def test_an_error_of_one_request_ends_the_others_of_its_call() -> None:
    """A group asked for together: what one request failed of, no answer of the seven others is used."""
    ended: list[str] = []

    class One(VllmEngine):
        async def _complete(self, request: Request) -> Completion:
            if request.request_id == "r-3":
                await asyncio.sleep(0)
                raise EngineError("vLLM: status 500")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(request.request_id)
            raise AssertionError

    requests = [replace(REQUEST, request_id=f"r-{number}") for number in range(8)]
    with pytest.raises(EngineError, match="status 500"):
        asyncio.run(One("http://127.0.0.1:1").generate(requests))
    assert sorted(ended) == [f"r-{number}" for number in range(8) if number != 3]
