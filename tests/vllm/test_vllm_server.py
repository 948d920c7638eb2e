"""Servers that do not come up say so, with port, log and remedy, and leave no process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_bridge.engines import server_args
from rollout_bridge.engines.protocol import EngineError
from rollout_bridge.engines.vllm_server import VllmServer
from tests.ports import free_port
from tests.running import group_runs, runs
from tests.vllm.conftest import keeps_cancellation, server_settings


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host=0.0.0.0"],
        ["--host", "0.0.0.0"],
        ["--hos=0.0.0.0"],
        ["--seed=1", "--uds=/tmp/x"],
        ["--config=server.yaml"],
        ["--served_model_name=x"],
        ["--no-skip-tokenizer-init"],
        ["--weight-transfer-config.backend=x"],
        ["-tp=2"],
        ["-dp", "2"],
        ["-dpa", "0.0.0.0"],
        ["-q=fp8"],
        ["--ssl-keyfile=/k"],
    ],
)
def test_arguments_that_open_the_server_or_break_the_protocol_are_refused(arguments, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="extra_args: -.* cannot be set here: "):
        VllmServer(server_settings(extra_args=tuple(arguments)), tmp_path / "log")


def test_every_argument_of_this_program_is_reserved_and_others_are_not(tmp_path: Path) -> None:
    everything = server_settings(
        tensor_parallel=2, data_parallel=2, expert_parallel=True, return_routed_experts=True
    )
    ours = VllmServer(everything, tmp_path / "log").arguments(tmp_path)
    left = {name for name in ours if not server_args.problem([name])}
    assert {name.split("=")[0] for name in left} <= {
        "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens",
        "--kv-cache-memory-bytes",
    }  # fmt: skip
    assert not server_args.problem(
        ["--seed=1", "--gpu-memory-utilization", "0.9", "--model-impl=transformers", "-O3", "--max-log-len=3"]
    )


def start(server: VllmServer, directory: Path) -> None:
    asyncio.run(server.start(directory, 1))


def assert_no_process(server: VllmServer) -> None:
    assert server.pid is not None
    assert not group_runs(server.pid)


def test_a_busy_port_is_found_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = VllmServer(server_settings(port=port), tmp_path / "vllm.log")
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1.*choose another port"):
            start(server, tmp_path)
    assert server.pid is None


def test_a_server_that_dies_names_its_log_and_the_cause_in_it(tmp_path: Path) -> None:
    """The environment makes the interpreter fail at once: no need to load vLLM for that."""
    broken = tmp_path / "site"
    (broken / "vllm").mkdir(parents=True)
    (broken / "vllm" / "__init__.py").write_text("raise RuntimeError('the kernels are gone')")
    settings = server_settings(environment={"PYTHONPATH": os.pathsep.join([str(broken), os.getcwd()])})
    server = VllmServer(settings, tmp_path / "logs" / "vllm.log")
    with pytest.raises(EngineError) as raised:
        start(server, tmp_path)
    message = str(raised.value)
    assert f"http://127.0.0.1:{settings.port}" in message
    assert "ended with status 1" in message
    assert str(tmp_path / "logs" / "vllm.log") in message
    assert "RuntimeError: the kernels are gone" in message
    assert_no_process(server)


def test_a_server_that_is_not_healthy_in_time_is_ended(tmp_path: Path) -> None:
    slow = tmp_path / "site"
    (slow / "vllm").mkdir(parents=True)
    (slow / "vllm" / "__init__.py").write_text(
        "print('still importing', flush=True); import time; time.sleep(99)"
    )
    settings = server_settings(
        startup_timeout=2.0, environment={"PYTHONPATH": os.pathsep.join([str(slow), os.getcwd()])}
    )
    server = VllmServer(settings, tmp_path / "vllm.log")
    with pytest.raises(EngineError, match=rf"waited 2 s .*:{settings.port} to be healthy.*start-up timeout"):
        start(server, tmp_path)
    assert_no_process(server)


def test_a_server_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL gives the parent no chance to stop it; the kernel tells the server."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import time; time.sleep(9999)")
    program = f"""
import asyncio, pathlib
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
settings = VllmServerSettings(port={free_port()}, environment={{"PYTHONPATH": {str(tmp_path)!r} + ":."}})
server = VllmServer(settings, pathlib.Path({str(tmp_path / "log")!r}))
def command_line(pid):
    return pathlib.Path(f"/proc/{{pid}}/cmdline").read_bytes()
async def main():
    starting = asyncio.create_task(server.start(pathlib.Path("."), 1))
    while server.pid is None or b"vllm.entrypoints" not in command_line(server.pid):
        await asyncio.sleep(0.02)
    print(server.pid, flush=True)
    await starting
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert runs(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    began = time.monotonic()
    try:
        while runs(pid):
            assert time.monotonic() - began < 120, "the server goes on without its parent"
            time.sleep(0.02)
    finally:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_that_comes_with_the_end_of_a_server_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, turns: int, tmp_path: Path
) -> None:
    """However many turns of the loop after it; else an agent told to stop would start the next server."""

    async def stop() -> bool:
        server: Any = VllmServer(server_settings(), tmp_path / "log")
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        signalled: list[int] = []

        async def wait() -> int:
            return await ended

        async def nobody_left(group: int) -> None: ...

        server._process = SimpleNamespace(
            pid=1, returncode=None, wait=wait, send_signal=lambda number: signalled.append(number)
        )
        monkeypatch.setattr(server, "_kill_group", nobody_left)
        stopping = asyncio.create_task(server.stop())
        while not signalled:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await keeps_cancellation(stopping, ended, 0, turns=turns)

    assert asyncio.run(stop())


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org", ""])
def test_only_a_loopback_address_is_taken(host: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not a loopback address"):
        VllmServer(server_settings(host=host), tmp_path / "log")


def test_free_ports_are_accepted(tmp_path: Path) -> None:
    VllmServer(server_settings(port=free_port()), tmp_path / "log").check_port()
