"""One real vLLM server (CPU) for the whole folder: starting one takes half a minute."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollout_bridge.engines.protocol import KvPolicy, UpdateReport
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.update import Update
from tests.ports import free_port
from tests.vllm import tiny_model
from tests.vllm.tiny_model import Tensors

T = TypeVar("T")


@dataclass
class Deployment:
    """A server, the mirror beside it, and what tensors the mirror holds. One event loop drives everything."""

    loop: asyncio.AbstractEventLoop
    directory: Path
    run: RunInfo
    mirror: Mirror
    tensors: Tensors
    version: int
    server: VllmServer

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def client(self, kv_policy: KvPolicy = KvPolicy.KEEP) -> VllmEngine:
        return VllmEngine(self.server.url, kv_policy=kv_policy)

    def move_mirror(self, new: Tensors) -> Update:
        """The next version: the mirror gets the new tensors."""
        self.version += 1
        self.tensors = self.tensors | new
        tiny_model.set_mirror(self.mirror, self.run, self.tensors, self.version)
        return Update(
            version=self.version,
            incarnation=1,
            step=self.version,
            changed=frozenset(new),
            tensor=self.mirror.tensor,
            mirror=self.mirror.directory,
            verified=len(new),
        )

    async def publish(self, engine: VllmEngine, new: Tensors) -> UpdateReport:
        return await engine.update(self.move_mirror(new))


async def stage(
    engine: VllmEngine, version: int, mirror: Path, changed: Sequence[str] = ()
) -> dict[str, Any]:
    """Stage as an update does, and wait: what the server's one worker says. No weight has been touched."""
    with tempfile.TemporaryDirectory(prefix="staged-") as reports:
        request = {"version": version, "mirror": str(mirror), "changed": list(changed), "reports": reports}
        await engine._rpc("mirror_stage", json.dumps(request))
        (status,) = await engine._reported(Path(reports), "staged")
    return status


async def leave_session_open(engine: VllmEngine, version: int, mirror: Path) -> None:
    """Begin a reload and do not end it: the next update fails inside its pause."""
    status = await stage(engine, version, mirror)
    assert status["state"] == "ready", status
    await engine._call("POST", "/start_weight_update")


async def keeps_cancellation(
    task: asyncio.Task[Any], awaited: asyncio.Future[T], value: T, *, turns: int
) -> bool:
    """Whether a cancellation of `task` is not lost that comes `turns` turns of the loop after what it awaits.

    Either it ends as cancelled, or it had ended before.
    """
    awaited.set_result(value)
    for _ in range(turns):
        await asyncio.sleep(0)
    accepted = task.cancel()
    await asyncio.wait([task])
    return task.cancelled() or not accepted


def server_settings(**changes: Any) -> VllmServerSettings:
    defaults: dict[str, Any] = {
        "port": free_port(),
        "startup_timeout": 300.0,
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "kv_cache_gib": 0.25,
    }
    return VllmServerSettings(**(defaults | changes))


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Version 1 of a random model, served from a checkpoint made without the weight chain's code."""
    directory = tmp_path_factory.mktemp("vllm")
    run = tiny_model.run_info()
    tensors = tiny_model.random_tensors(run, seed=1)
    mirror = Mirror(directory / "mirror")
    tiny_model.set_mirror(mirror, run, tensors, version=1)
    server = VllmServer(server_settings(), directory / "vllm.log")
    checkpoint = tiny_model.write_checkpoint(directory / "checkpoint", tensors)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        runner.run(server.start(checkpoint, 1))
        try:
            yield Deployment(loop, directory, run, mirror, tensors, 1, server)
        finally:
            runner.run(server.stop())
            mirror.close()
