"""The embedded engine against the model itself, through updates in flight."""

from __future__ import annotations

import asyncio
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.inference import slots, weights
from jaxtrain.inference.engine import EmbeddedEngine, EngineSettings
from jaxtrain.inference.slots import sample
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define, initialize
from rollout_bridge import architectures
from rollout_bridge.engines.protocol import EngineError, FinishReason, KvPolicy, Request
from rollout_bridge.quantization.host import float32_to_bfloat16_bits, quantize_block_fp8
from rollout_bridge.quantization.plan import Format, ServingLayout, plan_for, scale_name
from rollout_bridge.rollouts.generation import derive_seed
from rollout_bridge.weights.read.update import Update
from tests.jaxtrain.models.tiny import HF_CONFIG

SOURCES = architectures.tensors(HF_CONFIG)
PLAN = plan_for(SOURCES, serving=ServingLayout())
CONFIG = ModelConfig.from_hf(HF_CONFIG, compute_dtype="float32", remat="none")
EOS = 5


def make_update(tmp_path, version: int, scale: float = 20.0) -> Update:
    """Random weights of `version`, quantised as the chain carries them."""
    params = {p: scale * v if "norm" not in p else v for p, v in initialize(CONFIG, seed=version).items()}
    tensors: dict[str, np.ndarray] = {}
    for source in SOURCES:
        value = np.asarray(params[source.path])[source.index]
        value = value.T if source.transpose else value
        match PLAN.formats[source.name]:
            case Format.fp8_block:
                codes, scales = quantize_block_fp8(float32_to_bfloat16_bits(value))
                tensors[source.name], tensors[scale_name(source.name)] = codes, scales.view(np.uint32)
            case Format.bf16:
                tensors[source.name] = float32_to_bfloat16_bits(value)
            case Format.f32:
                tensors[source.name] = value.view(np.uint32)
    return Update(
        version=version,
        incarnation=1,
        step=version,
        changed=frozenset(tensors),
        tensor=tensors.__getitem__,
        mirror=tmp_path,
        verified=len(tensors),
    )


def params_of(update: Update):
    return weights.load(update, hf_config=HF_CONFIG, plan=PLAN, compute_dtype="float32", old=None)


def request(name: str, prompt, **changes) -> Request:
    values = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "stop_ids": (EOS,)}
    return Request(request_id=name, prompt_ids=prompt, **{**values, **changes})


class Held(EmbeddedEngine):
    """After its first tokens it makes none before other weights are ready, however long they take to load."""

    def _decode(self) -> None:
        while self._generated >= 4 and self._version == 1 and self._swap is None and not self._closed:
            time.sleep(0.001)
        super()._decode()


def engine_of(kind: type[EmbeddedEngine] = EmbeddedEngine, **changes) -> EmbeddedEngine:
    settings = {"slots": 4, "max_prompt": 8, "max_length": 64, "prompts": 2, "decode_tokens": 2}
    return kind(HF_CONFIG, PLAN, EngineSettings(**{**settings, **changes}), compute_dtype="float32")


def logprobs_of(params, prompt, tokens, *, temperature=1.0) -> np.ndarray:
    """Log-probabilities of `tokens` after `prompt` by one uncached pass."""
    length = len(prompt) + len(tokens)
    ids = np.zeros((1, 64), np.int32)  # padded to one length, so that one program serves every call
    ids[0, :length] = [*prompt, *tokens]
    table = np.asarray(jax.nn.log_softmax(_uncached(params, ids) / temperature))
    return table[np.arange(len(prompt) - 1, length - 1), np.asarray(tokens)]


@jax.jit
def _uncached(params, ids_1S):
    """Logits [S, V]; later tokens, padding among them, change nothing before."""
    model = define(CONFIG).bind(params)
    hidden, _ = model(ids_1S, jnp.arange(ids_1S.shape[1])[None], jnp.ones_like(ids_1S))
    return model.logits(hidden)[0]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 500))


def test_logprobs_are_those_of_the_sampling_distribution(tmp_path):
    """More requests than slots, two temperatures.

    Each result equals an uncached pass over the same weights.
    """
    update = make_update(tmp_path, 1)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 4], [11], [3, 3]]

    async def go():
        engine = engine_of()
        await engine.update(update)
        out = await engine.generate(
            [request(f"{i}", p, seed=i, temperature=[0.7, 1.0][i % 2]) for i, p in enumerate(prompts * 2)]
        )
        await engine.close()
        return out

    params = params_of(update)
    for index, completion in enumerate(run(go())):
        assert completion.request_id == str(index)
        assert 1 <= len(completion.token_ids) <= 12
        stopped = completion.token_ids[-1] == EOS
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert [(s.version, s.start, s.end) for s in completion.spans] == [(1, 0, len(completion.token_ids))]
        expected = logprobs_of(
            params, (prompts * 2)[index], completion.token_ids, temperature=[0.7, 1.0][index % 2]
        )
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-3)


def test_a_request_does_not_depend_on_its_company(tmp_path):
    update = make_update(tmp_path, 1)

    async def go():
        engine = engine_of()
        await engine.update(update)
        alone = (await engine.generate([request("a", [1, 2, 3])]))[0]
        crowd = await engine.generate(
            [request(f"{i}", [i, 4], seed=i) for i in range(5)] + [request("a", [1, 2, 3])]
        )
        await engine.close()
        return alone, crowd[-1]

    alone, crowded = run(go())
    np.testing.assert_array_equal(alone.token_ids, crowded.token_ids)


@pytest.mark.parametrize("policy", [KvPolicy.KEEP, KvPolicy.RECOMPUTE])
def test_weights_change_in_flight(tmp_path, policy):
    """Spans cross versions; with the cache recomputed, the later tokens are exactly the new policy's."""
    first, second = make_update(tmp_path, 1), make_update(tmp_path, 2)
    prompt = [1, 2, 3]

    async def go():
        engine = engine_of(Held, kv_policy=policy)
        await engine.update(first)
        task = asyncio.create_task(engine.generate([request("long", prompt, max_tokens=60, stop_ids=())]))
        while (await engine.health()).metrics["generated_tokens"] < 4:
            await asyncio.sleep(0.001)
        report = await engine.update(second)
        completion = (await task)[0]
        await engine.close()
        return report, completion

    report, completion = run(go())
    assert report.version == 2 and report.pause_ms <= report.total_ms
    assert [s.version for s in completion.spans] == [1, 2]
    cut = completion.spans[1].start
    assert (completion.spans[0].start, completion.spans[0].end, completion.spans[1].end) == (0, cut, 60)
    assert completion.kv_policy is policy
    old = logprobs_of(params_of(first), prompt, completion.token_ids)
    new = logprobs_of(params_of(second), prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs[:cut], old[:cut], atol=2e-3)
    if policy is KvPolicy.RECOMPUTE:
        np.testing.assert_allclose(completion.logprobs[cut:], new[cut:], atol=2e-3)
    else:
        assert np.abs(completion.logprobs[cut:] - new[cut:]).max() > 0.01


def test_exact_and_minimum_versions(tmp_path):
    """An exact version aborts when it passes, a minimum one waits for it."""
    first, second = make_update(tmp_path, 1), make_update(tmp_path, 2)

    async def go():
        engine = engine_of(Held)
        await engine.update(first)
        later = asyncio.create_task(engine.generate([request("later", [1], minimum_version=2)]))
        exact = asyncio.create_task(
            engine.generate([request("exact", [2], exact_version=1, max_tokens=56, stop_ids=())])
        )
        while (await engine.health()).metrics["generated_tokens"] < 2:
            await asyncio.sleep(0.001)
        await engine.update(second)
        results = (await later)[0], (await exact)[0]
        missed = (await engine.generate([request("missed", [2], exact_version=1)]))[0]
        await engine.close()
        return *results, missed

    later, exact, missed = run(go())
    assert {s.version for s in later.spans} == {2}
    assert exact.finish_reason is FinishReason.ABORT and {s.version for s in exact.spans} == {1}
    assert missed.finish_reason is FinishReason.ABORT and len(missed.token_ids) == 0


def test_routed_experts_are_those_of_the_full_pass(tmp_path):
    update = make_update(tmp_path, 1)
    prompt = [1, 2, 3]

    async def go():
        engine = engine_of(capture_routed_experts=True)
        await engine.update(update)
        completion = (await engine.generate([request("r", prompt)]))[0]
        await engine.close()
        return completion

    completion = run(go())
    total = len(prompt) + len(completion.token_ids)
    assert completion.routed_experts.shape == (total, CONFIG.num_moe_layers, CONFIG.num_experts_per_tok)
    assert (completion.routed_experts[-1] == -1).all() and (completion.routed_experts[:-1] >= 0).all()
    ids = jnp.asarray([*prompt, *completion.token_ids])[None]
    model = define(CONFIG).bind(params_of(update))
    _, statistics = model(ids[:, :-1], jnp.arange(total - 1)[None], jnp.ones_like(ids[:, :-1]))
    for layer in range(CONFIG.num_moe_layers):
        counts = np.bincount(completion.routed_experts[:-1, layer].ravel(), minlength=CONFIG.n_routed_experts)
        np.testing.assert_array_equal(counts, statistics.counts[layer])


def broken(*_: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("where", ["prefill", "insert", "decode"])
def test_a_failure_on_the_device_is_told_to_every_request(tmp_path, monkeypatch, where):
    async def go():
        engine = engine_of()
        await engine.update(make_update(tmp_path, 1))
        monkeypatch.setattr(slots, where, broken)
        requests = [engine.generate([request(f"{index}", [1 + index])]) for index in range(6)]
        told = await asyncio.gather(*requests, return_exceptions=True)
        health = await engine.health()
        await engine.close()
        return told, health

    told, health = run(go())
    assert all(isinstance(error, EngineError) and "out of memory" in str(error) for error in told)
    assert not health.ready and "restart the worker" in health.reason


def test_a_failure_while_weights_are_swapped_is_told_to_whoever_updates(tmp_path, monkeypatch):
    async def go():
        engine = engine_of(kv_policy=KvPolicy.RECOMPUTE)
        await engine.update(make_update(tmp_path, 1))
        monkeypatch.setattr(slots, "prefill", broken)
        with pytest.raises(EngineError, match="out of memory.*restart the worker"):
            await engine.update(make_update(tmp_path, 2))
        await engine.close()

    run(go())


def test_a_caller_whose_loop_has_ended_costs_the_engine_nothing(tmp_path):
    """The device thread finds a request whose future was cancelled with its loop."""
    engine = engine_of(Held)

    async def left():
        await engine.update(make_update(tmp_path, 1))
        asking = asyncio.create_task(engine.generate([request("left", [1], max_tokens=60, stop_ids=())]))
        while (await engine.health()).metrics["generated_tokens"] < 4:
            await asyncio.sleep(0.001)
        assert not asking.done()

    async def after():
        await engine.update(make_update(tmp_path, 2))  # lets it go on
        completions = await engine.generate([request(f"{index}", [2], max_tokens=4) for index in range(5)])
        await engine.close()
        return completions

    run(left())
    assert [completion.request_id for completion in run(after())] == [f"{index}" for index in range(5)]


def test_a_request_that_cannot_fit_is_refused_by_name(tmp_path):
    async def go():
        engine = engine_of()
        with pytest.raises(EngineError, match=r"request big: prompt of 9 tokens is not in \[1, 8\]"):
            await engine.generate([request("big", list(range(9)))])
        with pytest.raises(EngineError, match="lower rollouts.max_tokens"):
            await engine.generate([request("long", [1], max_tokens=64)])
        assert not (await engine.health()).ready
        await engine.close()

    run(go())


def test_samples_follow_the_distribution():
    """4,000 requests with seeds of their own: frequencies within 5 standard errors of the softmax at 0.7."""
    logits = jnp.array([2.0, 1.0, 0.0, -1.0])
    count = 4000
    seeds = jnp.asarray([derive_seed(0, i // 16, i % 16, 0) for i in range(count)], jnp.uint32)
    for index in (0, 3):
        tokens, logprobs = sample(
            jnp.tile(logits, (count, 1)), jnp.full(count, 0.7), seeds, jnp.full(count, index)
        )
        expected = np.asarray(jax.nn.softmax(logits / 0.7))
        found = np.bincount(tokens, minlength=4) / count
        assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count)).all()
        np.testing.assert_allclose(logprobs, np.log(expected)[np.asarray(tokens)], rtol=1e-4)
