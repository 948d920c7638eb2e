"""What becomes of running requests, and of cached prefixes, when weights change: every mode on a real server.

keep_kv's prefixes and requests in flight are in test_vllm_engine.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_bridge.engines.protocol import (
    Completion,
    FinishReason,
    KvPolicy,
    Request,
    UpdateMode,
    VersionSpan,
)
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_protocol import cached_prompt_tokens, generate_payload
from rollout_bridge.weights.read.update import Update
from tests.vllm import tiny_model
from tests.vllm.conftest import Deployment, stage

pytestmark = pytest.mark.vllm

LONG = Request(
    request_id="long", prompt_ids=tuple(range(40, 72)), max_tokens=1000, temperature=1.0, seed=1, stop_ids=()
)


async def under_way(
    engine: VllmEngine, deployment: Deployment, seed: int, requests: Sequence[Request]
) -> list[Completion]:
    """What `requests` bring when an update meets all of them running: one that does not yet would wait.

    They are asked once the new weights are staged, so that nothing slow comes before the pause; and again, if
    the first of them ended before the last one ran.
    """
    update = deployment.move_mirror(tiny_model.random_tensors(deployment.run, seed))
    stage = engine._stage
    asked: list[asyncio.Task[list[Completion]]] = []

    async def staged(update: Update, reports: Path) -> int:
        tensors = await stage(update, reports)
        asked.append(asyncio.create_task(engine.generate(requests)))
        while (await engine._metrics()).get("vllm:num_requests_running", 0.0) < len(requests):
            if asked[-1].done():
                asked[-1].result()
                asked.append(asyncio.create_task(engine.generate(requests)))
            await asyncio.sleep(0.05)
        return tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_stage", staged)
        await engine.update(update)
    return await asked[-1]


def test_drained_requests_end_with_the_weights_they_began_with(deployment: Deployment) -> None:
    old = deployment.version

    async def run() -> None:
        engine = deployment.client()
        engine.update_mode = UpdateMode.DRAIN
        asked = [replace(LONG, request_id=f"drain-{n}", seed=n) for n in range(3)]
        completions = await under_way(engine, deployment, 80, asked)
        assert [completion.spans for completion in completions] == 3 * [(VersionSpan(old, 0, 1000),)]
        assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
        (after,) = await engine.generate([replace(LONG, max_tokens=8)])
        assert after.spans == (VersionSpan(old + 1, 0, 8),)
        await engine.close()

    deployment.wait(run())


def test_aborted_requests_come_back_with_what_they_have(deployment: Deployment) -> None:
    old = deployment.version

    async def run() -> None:
        engine = deployment.client()
        engine.update_mode = UpdateMode.ABORT
        asked = [replace(LONG, request_id=f"abort-{n}", seed=n, max_tokens=4000) for n in range(3)]
        for completion in await under_way(engine, deployment, 81, asked):
            tokens = len(completion.token_ids)
            assert completion.finish_reason is FinishReason.ABORT
            assert tokens < 4000
            assert completion.spans == ((VersionSpan(old, 0, tokens),) if tokens else ())
        (after,) = await engine.generate([replace(LONG, max_tokens=8)])
        assert after.spans == (VersionSpan(old + 1, 0, 8),)
        await engine.close()

    deployment.wait(run())


def test_recompute_kv_leaves_no_prefix_of_an_older_policy(deployment: Deployment) -> None:
    """The same prompt before and after an update: after it, the numbers of an empty cache, which it found."""
    prompt = [(13 * n) % 500 for n in range(600)]

    async def run() -> None:
        engine = deployment.client(KvPolicy.RECOMPUTE)

        async def raw(salt: str | None) -> tuple[list[float], int]:
            request = replace(LONG, prompt_ids=prompt, max_tokens=2, temperature=0.0)
            response = await engine._call(
                "POST", "/inference/v1/generate", generate_payload(request, cache_salt=salt)
            )
            entries = response["choices"][0]["logprobs"]["content"]
            return [entry["logprob"] for entry in entries], cached_prompt_tokens(response)

        before, _ = await raw(None)
        assert (await raw(None))[1] >= 512, "there should be a prefix to be met"
        await deployment.publish(engine, tiny_model.random_tensors(deployment.run, 82))
        after, cached = await raw(None)
        fresh, _ = await raw("a salt nobody used")
        assert cached == 0
        assert after == pytest.approx(fresh, abs=1e-6)
        assert after != pytest.approx(before, abs=1e-3)
        await engine.close()

    deployment.wait(run())


def test_experts_of_a_layer_are_staged_as_the_two_tensors_that_vllm_keeps(deployment: Deployment) -> None:
    """Staging touches no weight. That they are loaded right is in test_serve.py, against a cold start."""
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"

    async def run() -> dict[str, Any]:
        engine = deployment.client()
        status = await stage(engine, deployment.version, deployment.mirror.directory, [expert])
        await engine.close()
        return status

    status = deployment.wait(run())
    assert (status["state"], status["tensors"], status["stacked"]) == ("ready", 12, 2), status


def test_vllm_can_reload_by_itself_after_an_update(deployment: Deployment, tmp_path: Path) -> None:
    """Stacked experts come as one tensor; the engine's own reload takes them one by one, and is not refused.

    What its CPU kernel then makes of them is another matter (`repacked_experts`); the next update is right.
    """

    async def run() -> None:
        engine = deployment.client()
        await deployment.publish(engine, tiny_model.random_tensors(deployment.run, 83))
        directory = await asyncio.to_thread(deployment.mirror.materialize, tmp_path, "bf16")
        await engine._call("POST", "/pause?mode=keep&clear_cache=true")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await engine._call("POST", "/collective_rpc", reload)
        await engine._call("POST", "/resume")
        await deployment.publish(engine, tiny_model.random_tensors(deployment.run, 84))
        (after,) = await engine.generate([replace(LONG, max_tokens=8)])
        assert after.spans == (VersionSpan(deployment.version, 0, 8),)
        await engine.close()

    deployment.wait(run())
