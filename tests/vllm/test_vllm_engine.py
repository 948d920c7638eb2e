"""The engine against a real server: what it generates, and weights that change under it.

Oracles: transformers for log-probabilities. That updated weights equal loaded ones is in test_serve.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_bridge.engines.protocol import (
    Completion,
    EngineError,
    FinishReason,
    KvPolicy,
    Request,
    VersionSpan,
)
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_protocol import cached_prompt_tokens, generate_payload
from tests.vllm import tiny_model
from tests.vllm.conftest import Deployment, leave_session_open

pytestmark = pytest.mark.vllm

PROMPT = tuple(range(40, 72))


def request(name: str = "r", **changes: object) -> Request:
    base = Request(request_id=name, prompt_ids=PROMPT, max_tokens=16, temperature=0.0, seed=0, stop_ids=())
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]


def of_moe_layer(name: str) -> bool:
    return "layers.1.mlp.experts.2." in name


def of_many_modules(name: str) -> bool:
    parts = ("k_proj", "shared_experts.up", "mlp.gate.", "experts.0.down", "input_layernorm", "lm_head")
    return any(part in name for part in parts)


def test_logprobs_are_those_of_transformers(deployment: Deployment, tmp_path: Path) -> None:
    """At the request's temperature: BF16 against float32 arithmetic on the same weights, and random weights
    amplify rounding (mean 0.03, largest 0.16 seen). At another temperature they are far off. Where two
    experts are nearly as good, rounding decides which one a token gets: such tokens are left out (scores
    0.003 apart made 4.2 of difference once, and transformers in BF16 chose as the server did).
    """

    async def serve() -> Completion:
        engine = deployment.client()
        completions = await engine.generate([request(max_tokens=24, temperature=0.7, seed=5)])
        await engine.close()
        return completions[0]

    completion = deployment.wait(serve())
    checkpoint = tiny_model.write_checkpoint(tmp_path / "checkpoint", deployment.tensors)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    routed: list[torch.Tensor] = []
    for gate in gates:
        gate.register_forward_pre_hook(lambda _, inputs: routed.append(inputs[0].reshape(ids.shape[1], -1)))
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1]
    clear = np.ones(24, bool)
    for gate, inputs in zip(gates, routed, strict=True):
        scores = torch.sigmoid(inputs @ gate.weight.detach().T) + gate.e_score_correction_bias
        k = model.config.num_experts_per_tok
        best = scores.topk(k + 1).values[len(PROMPT) - 1 : -1]
        clear &= (best[:, k - 1] - best[:, k]).numpy() > 0.01

    def expected(temperature: float) -> np.ndarray:
        table = torch.log_softmax(logits / temperature, -1)
        return table.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()

    assert completion.token_ids.shape == completion.logprobs.shape == (24,)
    assert clear.sum() >= 20
    difference = np.abs(completion.logprobs - expected(0.7))[clear]
    assert difference.mean() < 0.08
    assert difference.max() < 0.4
    assert np.abs(completion.logprobs - expected(1.0)).mean() > 0.2


def test_a_seed_decides_the_sample_and_nothing_else_does(deployment: Deployment) -> None:
    async def sample() -> list[Completion]:
        engine = deployment.client()
        sampled = request(temperature=1.0, max_tokens=12)
        completions = []
        for name, seed in (("a", 3), ("b", 3), ("c", 4)):
            # One at a time: rounding differs with what else is in the batch, that is with who came when.
            completions += await engine.generate([replace(sampled, request_id=name, seed=seed)])
        await engine.close()
        return completions

    one, two, other = deployment.wait(sample())
    assert one.token_ids.tolist() == two.token_ids.tolist() != other.token_ids.tolist()


def test_a_stop_token_ends_a_completion_and_is_its_last(deployment: Deployment) -> None:
    async def stop() -> tuple[Completion, Completion]:
        engine = deployment.client()
        free = (await engine.generate([request()]))[0]
        stopped = (await engine.generate([request(stop_ids=[int(free.token_ids[3])])]))[0]
        await engine.close()
        return free, stopped

    free, stopped = deployment.wait(stop())
    length = free.token_ids.tolist().index(free.token_ids[3]) + 1
    assert free.finish_reason is FinishReason.LENGTH
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids.tolist() == free.token_ids[:length].tolist()
    assert stopped.spans == (VersionSpan(deployment.version, 0, length),)


def test_what_the_server_refuses_is_an_engine_error_with_its_words(deployment: Deployment) -> None:
    async def refuse() -> None:
        engine = deployment.client()
        try:
            await engine.generate([request(prompt_ids=[5] * 5000)])
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="answered 400.*5000"):
        deployment.wait(refuse())


@pytest.mark.parametrize("kv_policy", list(KvPolicy))
def test_weights_change_under_running_requests(deployment: Deployment, kv_policy: KvPolicy) -> None:
    """Clients ask until all updates are done: no request is lost, spans cross versions in order, and what is
    asked after the last update is of the last version. Each update begins while requests of all of them run.
    """
    first = deployment.version
    updated = asyncio.Event()
    # twice the same expert layer, then all modules
    news = [
        tiny_model.random_tensors(deployment.run, seed + first, wanted)
        for seed, wanted in ((2, of_moe_layer), (3, of_many_modules), (4, lambda name: True))
    ]

    async def client(engine: VllmEngine, name: int) -> list[Completion]:
        completions = []
        while not updated.is_set():
            asked = request(f"long-{name}", max_tokens=600 + 100 * name, temperature=1.0, seed=name)
            completions += await engine.generate([asked])
        return completions

    async def run() -> tuple[list[Completion], Completion]:
        engine = deployment.client(kv_policy)
        clients = [asyncio.create_task(client(engine, name)) for name in range(4)]
        for new in news:
            while (await engine._metrics()).get("vllm:num_requests_running", 0.0) < len(clients):
                assert not any(client.done() for client in clients), clients
                await asyncio.sleep(0.05)
            update = await asyncio.to_thread(deployment.move_mirror, new)  # answers arrive meanwhile
            report = await engine.update(update)
            assert report.version == deployment.version
            assert 0 < report.pause_ms <= report.total_ms
            assert report.tensors > 0
        updated.set()
        completions = [completion for made in await asyncio.gather(*clients) for completion in made]
        (last,) = await engine.generate([request()])
        assert (await engine.health()).ready
        assert await engine.version() == deployment.version == first + 3
        await engine.close()
        return completions, last

    completions, last = deployment.wait(run())
    assert last.spans == (VersionSpan(first + 3, 0, 16),)
    for completion in completions:
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) in (600, 700, 800, 900)
        assert completion.kv_policy is kv_policy
        versions = [span.version for span in completion.spans]
        assert versions == sorted(set(versions))
        assert first <= versions[0] <= versions[-1] <= first + 3
    assert any(len(completion.spans) > 1 for completion in completions)


def test_keep_kv_never_reuses_an_older_policys_prefix(deployment: Deployment) -> None:
    """The same prompt before and after an update: after it, the numbers of an empty cache.

    The oracle is the same prompt under a salt of its own. That a prefix is reused within a version shows that
    there was one to reuse.
    """

    async def run() -> None:
        engine = deployment.client()
        long_prompt = [(11 * n) % 500 for n in range(600)]

        async def raw(salt: str) -> tuple[list[float], int]:
            response = await engine._call(
                "POST",
                "/inference/v1/generate",
                generate_payload(request(prompt_ids=long_prompt, max_tokens=2), cache_salt=salt),
            )
            entries = response["choices"][0]["logprobs"]["content"]
            return [entry["logprob"] for entry in entries], cached_prompt_tokens(response)

        before = (await engine.generate([request(prompt_ids=long_prompt, max_tokens=2)]))[0]
        reused = await raw(str(deployment.version))
        assert reused[1] >= 512
        old = deployment.version
        await deployment.publish(engine, tiny_model.random_tensors(deployment.run, 50))
        stale = await raw(str(old))
        assert stale[1] >= 512, "the old prefix should still be there to be met"
        after = (await engine.generate([request(prompt_ids=long_prompt, max_tokens=2)]))[0]
        fresh = await raw("a salt nobody used")
        assert fresh[1] == 0
        assert after.logprobs.tolist() == pytest.approx(fresh[0], abs=1e-6)
        assert after.logprobs.tolist() != pytest.approx(stale[0], abs=1e-3)
        assert after.logprobs.tolist() != pytest.approx(before.logprobs.tolist(), abs=1e-3)
        await engine.close()

    deployment.wait(run())


def test_a_prompt_prefilled_after_an_update_it_was_sent_before_is_generated_anew(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose idea of the version is one update old: its first answer used the old prefix."""
    sent: list[str] = []

    async def run() -> Completion:
        engine = deployment.client()
        prompt = [(7 * n) % 500 for n in range(600)]
        await engine.generate([request(prompt_ids=prompt)])
        late = deployment.version
        await deployment.publish(engine, tiny_model.random_tensors(deployment.run, 60, of_moe_layer))
        true_version, call = engine.version, engine._call
        answers = iter([late])

        async def version() -> int | None:
            return next(answers, None) or await true_version()

        async def record(method: str, path: str, body: object = None, **options: object) -> object:
            if path == "/inference/v1/generate":
                assert isinstance(body, dict)
                sent.append(body["cache_salt"])
            return await call(method, path, body, **options)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(engine, "version", version)
        monkeypatch.setattr(engine, "_call", record)
        completion = (await engine.generate([request(prompt_ids=prompt)]))[0]
        await engine.close()
        return completion

    completion = deployment.wait(run())
    assert sent == [str(deployment.version - 1), str(deployment.version)]
    assert completion.spans[0].version == deployment.version


def test_exact_and_minimum_versions(deployment: Deployment) -> None:
    """That a completion is cut where its exact version ends is tested in test_vllm_protocol.py."""

    async def run() -> tuple[list[Completion], Completion]:
        engine = deployment.client()
        now = deployment.version
        waiting = asyncio.create_task(engine.generate([request("later", minimum_version=now + 1)]))
        at_once = await engine.generate(
            [request("past", exact_version=now - 1), request("present", exact_version=now)]
        )
        assert not waiting.done()
        await deployment.publish(engine, tiny_model.random_tensors(deployment.run, 70, of_moe_layer))
        later = (await waiting)[0]
        await engine.close()
        return at_once, later

    now = deployment.version
    (past, present), later = deployment.wait(run())
    assert (past.finish_reason, len(past.token_ids), past.spans) == (FinishReason.ABORT, 0, ())
    assert present.spans == (VersionSpan(now, 0, 16),)
    assert later.spans == (VersionSpan(now + 1, 0, 16),)


def test_a_tensor_that_the_mirror_lacks_fails_the_update_before_the_pause(deployment: Deployment) -> None:
    """Staging touches nothing: this client is unhealthy, the server goes on with the version it had."""

    async def run() -> None:
        engine, other = deployment.client(), deployment.client()
        update = replace(deployment.move_mirror({}), changed=frozenset({"model.layers.9.nonsense.weight"}))
        with pytest.raises(EngineError, match=r"version \d+ failed.*nonsense.*restart"):
            await engine.update(update)
        health = await engine.health()
        assert not health.ready
        assert "nonsense" in health.reason
        with pytest.raises(EngineError, match="nonsense"):
            await engine.generate([request()])
        assert (await other.health()).ready
        assert await other.version() == deployment.version - 1
        await deployment.publish(other, {})
        await engine.close()
        await other.close()

    deployment.wait(run())


def test_a_failed_reload_leaves_the_server_paused_and_the_engine_unhealthy(deployment: Deployment) -> None:
    """The failure inside the pause is a session that somebody else began. Last: the server is lost by it.

    That it is started anew from the mirror, with the same weights, is tested with the agent in test_serve.py.
    """

    async def run() -> None:
        engine = deployment.client()
        update = deployment.move_mirror({})
        await leave_session_open(engine, update.version, update.mirror)
        with pytest.raises(EngineError, match="already active"):
            await engine.update(update)
        assert (await engine._call("GET", "/is_paused"))["is_paused"]
        health = await engine.health()
        assert not health.ready
        assert "restart the server" in health.reason
        with pytest.raises(EngineError, match="restart the server"):
            await engine.update(update)
        await engine.close()

    deployment.wait(run())
