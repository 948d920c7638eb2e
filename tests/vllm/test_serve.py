"""`serve` as a process of its own: store -> mirror -> a real server, an update that fails, and the end.

The oracle of updated weights is the server that replaces the updated one: it loads the same from files.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rollout_bridge import serve as serving
from rollout_bridge.engines.protocol import EngineError, KvPolicy, Request, VersionSpan
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
from rollout_bridge.serve import ServeError, ServeSettings, serve
from rollout_bridge.store import Store
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.write.publisher import Publisher
from tests.ports import free_port
from tests.running import group_runs
from tests.vllm import tiny_model
from tests.vllm.conftest import leave_session_open

SERVE = """
import logging, pathlib, sys
from rollout_bridge.serve import ServeSettings, serve
from rollout_bridge.agent import AgentSettings
from rollout_bridge.engines.vllm_server import VllmServerSettings
logging.basicConfig(level=logging.INFO)
serve(ServeSettings(store=sys.argv[1], state_directory=pathlib.Path(sys.argv[2]), agent_id="host-a",
    server=VllmServerSettings(port=int(sys.argv[3]), max_model_len=2048, max_num_seqs=16, kv_cache_gib=0.25,
        startup_timeout=300),
    first_version_timeout=60, agent=AgentSettings(poll=0.1, retry=0.1)))
"""
DEADLINE = 400.0

Params = dict[str, np.ndarray]


def nudged(params: Params, seed: int, *, only: str = "") -> Params:
    """A change that shows: a fifth of each parameter's own size."""
    random = np.random.default_rng(seed)
    return {
        path: array + 0.2 * array.std() * random.standard_normal(array.shape).astype(np.float32)
        if only in path
        else array
        for path, array in params.items()
    }


def until(what: str, condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    began = time.monotonic()
    while not (found := condition()):
        assert process.poll() is None, f"serve ended with {process.returncode} before {what}"
        assert time.monotonic() - began < DEADLINE, f"no {what} in {DEADLINE} s"
        time.sleep(0.1)
    return found


def read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None


async def portrait(url: str) -> tuple[list[Any], dict[str, str]]:
    """Tokens and log-probabilities of three greedy completions, and the SHA-256 of the model's parameters.

    vLLM keeps no parameter of a linear layer that it packed for a CPU: those show in the completions alone.
    """
    engine = VllmEngine(url)
    completions = []
    for shift in range(3):
        request = Request(
            request_id="r",
            prompt_ids=[7 + shift, 9, 100, 30 + shift] * 80,  # whole blocks, which the prefix cache keeps
            max_tokens=16,
            temperature=0.0,
            seed=0,
            stop_ids=(),
        )
        (completion,) = await engine.generate([request])
        completions.append((completion.token_ids.tolist(), completion.logprobs.tolist()))
    checksums = (await engine._call("POST", "/weight_checker", {"action": "checksum"}))["checksums"]
    await engine.close()
    return completions, checksums


async def begin_reload(url: str, version: int, mirror: Path) -> None:
    engine = VllmEngine(url)
    await leave_session_open(engine, version, mirror)
    await engine.close()


async def complete(url: str) -> tuple[VersionSpan, ...]:
    engine = VllmEngine(url)
    request = Request(request_id="r", prompt_ids=[3, 4], max_tokens=4, temperature=1.0, seed=0, stop_ids=())
    (completion,) = await engine.generate([request])
    await engine.close()
    return completion.spans


@pytest.mark.vllm
def test_a_server_follows_the_chain_survives_a_failed_update_and_ends_on_sigterm(tmp_path: Path) -> None:
    url, state, port = f"file://{tmp_path}/store", tmp_path / "state", free_port()
    store = Store.open(url)
    run = runs.create_or_join(store, tiny_model.run_info())
    publisher = Publisher(store, run=run, full_every=100)
    publisher.take_over()
    params = tiny_model.random_params(run, seed=1)

    def publish(tree: Params, step: int) -> int:
        arrays = {path: jax.numpy.asarray(array) for path, array in tree.items()}
        return publisher.publish(arrays, step=step).result(DEADLINE).version

    assert publish(params, 1) == 1
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, url, str(state), str(port)],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        ready = until("server", lambda: read(state / "ready.json"), process)
        assert ready["url"] == f"http://127.0.0.1:{port}"
        assert asyncio.run(complete(ready["url"])) == (VersionSpan(1, 0, 4),)
        first = asyncio.run(portrait(ready["url"]))

        def acknowledged(version: int) -> Any:
            ack = store.read_json("weights/acks/host-a.json")
            return ack if isinstance(ack, dict) and ack["version"] == version else None

        for version, only in ((2, ""), (3, "experts"), (4, "experts/up_proj"), (5, "k_proj/bias")):
            params = nudged(params, version, only=only)
            assert publish(params, version) == version
            ack = until(f"version {version}", lambda v=version: acknowledged(v), process)
            assert ack["errors"] == 0
        assert read(state / "ready.json") == ready, "the server of version 1 serves version 5"
        assert asyncio.run(complete(ready["url"])) == (VersionSpan(5, 0, 4),)
        updated = asyncio.run(portrait(ready["url"]))
        assert updated[0] != first[0]
        assert updated[1] != first[1]

        asyncio.run(begin_reload(ready["url"], 5, state / "mirror"))
        assert publish(params, 6) == 6  # the same parameters: what is served must not differ
        ack = until("version 6", lambda: acknowledged(6), process)
        assert ack["errors"] == 1
        again = until("another server", lambda: read(state / "ready.json"), process)
        assert again["pid"] != ready["pid"]
        assert again["version"] == 6
        assert asyncio.run(portrait(again["url"])) == updated

        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
        assert not group_runs(again["pid"])
        assert not (state / "ready.json").exists()
        VllmServer(VllmServerSettings(port=port), tmp_path / "log").check_port()
    finally:
        publisher.close()
        if process.poll() is None:
            process.terminate()
            process.wait(DEADLINE)


def test_a_busy_port_ends_serving_before_the_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PORT_SECONDS", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        settings = ServeSettings(
            store="no such scheme://x",
            state_directory=tmp_path,
            agent_id="a",
            server=VllmServerSettings(port=other.getsockname()[1]),
        )
        with pytest.raises(EngineError, match=rf"port {settings.server.port} .*choose another port"):
            serve(settings)


def test_a_port_that_a_server_of_before_still_has_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an agent that was killed: its server has been told to end, and does so a while later."""
    monkeypatch.setattr(serving, "POLL_SECONDS", 0.01)
    looks: list[VllmServer] = []
    check = VllmServer.check_port

    def looked(server: VllmServer) -> None:
        looks.append(server)
        check(server)

    monkeypatch.setattr(VllmServer, "check_port", looked)

    async def wait(other: socket.socket) -> None:
        server = VllmServer(VllmServerSettings(port=other.getsockname()[1]), tmp_path / "log")
        waiting = asyncio.create_task(serving.free_ports([server]))
        while len(looks) < 3:
            assert not waiting.done()
            await asyncio.sleep(0.01)
        other.close()
        await waiting

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        asyncio.run(wait(other))


def test_a_run_without_a_version_is_waited_for_and_then_named(tmp_path: Path) -> None:
    settings = ServeSettings(
        store=f"file://{tmp_path}/store",
        state_directory=tmp_path / "state",
        agent_id="a",
        server=VllmServerSettings(port=free_port()),
        first_version_timeout=0.3,
    )
    with pytest.raises(
        ServeError, match=r"waited 0.3 s for a policy version in .*store/ \(weights/latest.*trainer"
    ):
        serve(settings)


def test_a_cpu_gets_a_bounded_cache_no_compilation_and_whole_prompts(tmp_path: Path) -> None:
    settings = ServeSettings(store="x", state_directory=tmp_path, agent_id="a", kv_policy=KvPolicy.RECOMPUTE)
    on_cpu = serving.server_settings(settings, gpus=())
    on_gpu = serving.server_settings(settings, gpus=("0",))
    assert (on_cpu.kv_cache_gib, on_cpu.enforce_eager, on_cpu.chunked_prefill) == (1.0, True, False)
    assert (on_gpu.kv_cache_gib, on_gpu.enforce_eager, on_gpu.chunked_prefill) == (None, False, True)


def test_servers_of_a_host_share_its_cores_or_gpus_and_have_ports_of_their_own(tmp_path: Path) -> None:
    settings = ServeSettings(
        store="x",
        state_directory=tmp_path,
        agent_id="a",
        servers=2,
        server=VllmServerSettings(tensor_parallel=2, cpu_threads="0-5,8,9"),
    )
    on_cpu = [serving.server_settings(settings, gpus=(), number=number) for number in range(2)]
    assert [server.cpu_threads for server in on_cpu] == ["0,1|2,3", "4,5|8,9"]
    assert [server.port for server in on_cpu] == [8000, 8001]
    on_gpu = [serving.server_settings(settings, gpus="3456", number=number) for number in range(2)]
    assert [server.environment["CUDA_VISIBLE_DEVICES"] for server in on_gpu] == ["3,4", "5,6"]
    assert "--tensor-parallel-size=2" in VllmServer(on_gpu[0], tmp_path / "log").arguments(tmp_path)
    with pytest.raises(ServeError, match="2 servers of 2 ranks need 4 GPUs, this host has 3"):
        serving.server_settings(settings, gpus=("0", "1", "2"), number=1)


def test_fewer_cores_than_ranks_are_shared() -> None:
    assert serving.cpu_shares([0, 1], 4) == ["0", "1", "0", "1"]
