"""A server of two ranks updated in flight. The oracle is the same server started from files.

Expert parallelism is not among the layouts: with it vLLM 0.32's CPU kernel dies in its first step.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout_bridge.engines.protocol import Completion, Request, VersionSpan
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
from rollout_bridge.weights.read.mirror import Mirror
from tests.vllm import tiny_model
from tests.vllm.conftest import Deployment, server_settings

LAYOUTS = {
    "tensor": {"tensor_parallel": 2},
}


async def portrait(engine: VllmEngine) -> list[Completion]:
    """Greedy completions, one at a time so that batches do not differ."""
    completions = []
    for shift in range(3):
        request = Request(
            request_id="p",
            prompt_ids=[(11 * n + shift) % 500 for n in range(300)],
            max_tokens=12,
            temperature=0.0,
            seed=0,
            stop_ids=(),
        )
        completions += await engine.generate([request])
    return completions


@pytest.mark.vllm
@pytest.mark.faults
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_serve_the_updated_weights(layout: str, tmp_path: Path, record_property) -> None:
    settings: VllmServerSettings = server_settings(
        startup_timeout=600.0, max_model_len=1024, cpu_threads="0|1", **LAYOUTS[layout]
    )
    run = tiny_model.run_info()
    tensors = tiny_model.random_tensors(run, 1)
    mirror = Mirror(tmp_path / "mirror")
    tiny_model.set_mirror(mirror, run, tensors, 1)
    server = VllmServer(settings, tmp_path / "vllm.log")

    async def served_in_flight(deployment: Deployment) -> list[Completion]:
        await server.start(tiny_model.write_checkpoint(tmp_path / "first", tensors), 1)
        engine = deployment.client()
        first = await portrait(engine)
        long = Request(
            request_id="long", prompt_ids=[5, 6, 7], max_tokens=400, temperature=1.0, seed=1, stop_ids=()
        )
        running = asyncio.create_task(engine.generate([long]))
        # everything, then twice the experts of the same layer
        for seed, wanted in ((2, ""), (3, "experts."), (4, "experts.1.")):
            new = tiny_model.random_tensors(run, seed, lambda name, wanted=wanted: wanted in name)
            await deployment.publish(engine, new)
        (completion,) = await running
        assert completion.spans[-1].version <= 4
        assert [span.version for span in completion.spans] == sorted(
            span.version for span in completion.spans
        )
        updated = await portrait(engine)
        assert [c.token_ids.tolist() for c in updated] != [c.token_ids.tolist() for c in first]
        await engine.close()
        await server.stop()
        return updated

    async def cold(deployment: Deployment) -> list[Completion]:
        await server.start(tiny_model.write_checkpoint(tmp_path / "last", deployment.tensors), 4)
        engine = deployment.client()
        completions = await portrait(engine)
        await engine.close()
        await server.stop()
        return completions

    with asyncio.Runner() as runner:
        deployment = Deployment(runner.get_loop(), tmp_path, run, mirror, tensors, 1, server)
        try:
            updated = runner.run(served_in_flight(deployment))
            fresh = runner.run(cold(deployment))
        finally:
            runner.run(server.stop())
            mirror.close()
    for one, other in zip(updated, fresh, strict=True):
        assert one.spans == other.spans == (VersionSpan(4, 0, 12),)
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-5)
    record_property("outcome", "log-probabilities of a cold start")
