"""When a server is given up and started anew: the decisions, with stand-ins for process and client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollout_bridge.engines import vllm_served
from rollout_bridge.engines.protocol import EngineError, KvPolicy, UpdateMode, UpdateReport
from rollout_bridge.engines.vllm_served import ServedVllm, ServerFailed
from rollout_bridge.engines.vllm_server import VllmServerSettings
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.update import Update
from tests.vllm import tiny_model
from tests.vllm.conftest import keeps_cancellation

T = TypeVar("T")


class Process:
    """Instead of `VllmServer`: which directories were loaded; `refuse` starts fail."""

    def __init__(self, settings: VllmServerSettings, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{settings.port}", log
        self.alive = False
        self.loaded: list[str] = []
        self.refuse = 0
        self.served: int | None = None

    @property
    def pid(self) -> int:
        return 100 + len(self.loaded)

    async def start(self, directory: Path, version: int | None) -> None:
        assert not self.alive
        assert version is None, "a server has a version only once it is admitted"
        if self.refuse:
            self.refuse -= 1
            raise EngineError("port 8000: taken; see the log")
        assert (directory / "config.json").exists()
        self.loaded.append(directory.name)
        self.alive, self.served = True, version

    async def stop(self) -> None:
        self.alive = False

    def excerpt(self) -> str:
        return "last words"


class Client:
    """Instead of `VllmEngine`: fails as long as `failure` says."""

    def __init__(
        self,
        url: str,
        *,
        kv_policy: KvPolicy,
        update_mode: UpdateMode,
        request_timeout: float,
        update_timeout: float,
    ) -> None:
        del url, update_mode, request_timeout, update_timeout
        self.kv_policy = kv_policy
        self.failure = ""
        self.process: Process

    def restarted(self) -> None:
        self.failure = ""

    async def version(self) -> int | None:
        if self.failure:
            raise EngineError(self.failure)
        return self.process.served

    async def update(self, update: Update) -> UpdateReport:
        if self.failure:
            raise EngineError(self.failure)
        self.process.served = update.version
        return UpdateReport(version=update.version, pause_ms=1.0, total_ms=2.0, tensors=3)

    async def warm_up(self) -> None:
        assert self.process.served is None

    async def set_version(self, version: int) -> None:
        self.process.served = version

    async def close(self) -> None: ...


class Host:
    """A `ServedVllm` with stand-ins, and a mirror to hand to it."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.state.mkdir()
        self.engine = ServedVllm(
            VllmServerSettings(), self.state, kv_policy=KvPolicy.KEEP, engine_format="bf16"
        )
        self.process: Any = self.engine.server
        self.client: Any = self.engine._engine
        self.client.process = self.process
        self.run = tiny_model.run_info()
        self.tensors = tiny_model.random_tensors(self.run, 1)
        self.mirror = Mirror(directory / "mirror")

    def at(self, version: int) -> Update:
        tiny_model.set_mirror(self.mirror, self.run, self.tensors, version)
        return Update(
            version=version,
            incarnation=1,
            step=version,
            changed=frozenset(self.tensors),
            tensor=self.mirror.tensor,
            mirror=self.mirror.directory,
            verified=0,
        )

    @property
    def ready(self) -> dict[str, Any] | None:
        file = self.state / "ready.json"
        return json.loads(file.read_text()) if file.exists() else None


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(vllm_served, "VllmServer", Process)
    monkeypatch.setattr(vllm_served, "VllmEngine", Client)
    return Host(tmp_path)


def wait(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_the_first_update_starts_the_server_and_later_ones_do_not(host: Host) -> None:
    assert wait(host.engine.version()) is None
    report = wait(host.engine.update(host.at(4)))
    assert (report.version, host.process.loaded) == (4, ["00000004-000001-000000000000-bf16"])
    assert host.ready == {"url": "http://127.0.0.1:8000", "pid": 101, "version": 4, "kv_policy": "keep_kv"}
    assert wait(host.engine.update(host.at(5))).pause_ms == 1.0
    assert wait(host.engine.version()) == 5
    assert len(host.process.loaded) == 1


def test_a_failed_update_gives_the_server_up_and_the_next_starts_from_the_mirror(host: Host) -> None:
    wait(host.engine.update(host.at(4)))
    host.client.failure = "reload broke"
    with pytest.raises(EngineError, match="reload broke"):
        wait(host.engine.update(host.at(5)))
    assert wait(host.engine.version()) is None
    assert host.ready is None
    assert not wait(host.engine.health()).ready
    wait(host.engine.update(host.at(5)))
    assert host.process.loaded == ["00000004-000001-000000000000-bf16", "00000005-000001-000000000000-bf16"]
    assert wait(host.engine.version()) == 5
    assert [path.name for path in (host.state / "engine").iterdir()] == ["00000005-000001-000000000000-bf16"]


def test_a_dead_server_has_no_version_and_is_started_again(host: Host) -> None:
    wait(host.engine.update(host.at(4)))
    host.process.alive = False
    assert wait(host.engine.version()) is None
    assert host.ready is None
    wait(host.engine.update(host.at(4)))
    assert host.ready is not None
    assert wait(host.engine.version()) == 4


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_that_comes_with_an_answer_is_not_lost(host: Host, turns: int) -> None:
    """However many turns of the loop after the answer; else a server would not stop at the first SIGTERM."""
    wait(host.engine.update(host.at(4)))

    async def ask() -> bool:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def version() -> int:
            return await answer

        host.client.version = version
        asked = asyncio.create_task(host.engine.version())
        await asyncio.sleep(0.01)
        return await keeps_cancellation(asked, answer, 4, turns=turns)

    assert wait(ask())


def test_silence_is_asked_again_and_then_given_up(host: Host) -> None:
    wait(host.engine.update(host.at(4)))
    host.client.failure = "no route"
    for _ in range(vllm_served.MISSED_ANSWERS - 1):
        with pytest.raises(EngineError, match="asking again"):
            wait(host.engine.version())
    assert wait(host.engine.version()) is None


def test_a_first_start_that_fails_is_final_and_later_ones_get_three_attempts(host: Host) -> None:
    host.process.refuse = 1
    with pytest.raises(ServerFailed, match="port 8000: taken; see the log"):
        wait(host.engine.update(host.at(4)))
    wait(host.engine.update(host.at(4)))
    host.process.alive, host.process.refuse = False, vllm_served.RESTART_ATTEMPTS
    for _ in range(vllm_served.RESTART_ATTEMPTS - 1):
        with pytest.raises(EngineError):
            wait(host.engine.update(host.at(4)))
    with pytest.raises(ServerFailed):
        wait(host.engine.update(host.at(4)))


def test_a_mirror_that_moved_on_is_not_loaded_under_the_older_number(host: Host) -> None:
    update = host.at(4)
    with pytest.raises(EngineError, match="holds version 4, the update is to 3"):
        wait(host.engine.update(replace(update, version=3)))
    assert host.process.loaded == []


def test_closing_stops_the_server_and_takes_the_ready_file_away(host: Host) -> None:
    wait(host.engine.update(host.at(4)))
    wait(host.engine.close())
    assert not host.process.alive
    assert host.ready is None
