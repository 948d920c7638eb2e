"""The decisions of a fleet and of a pool, with stand-ins for servers. With processes: tests/faults."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_bridge.engines import vllm_fleet
from rollout_bridge.engines.protocol import EngineError, Health, Request, UpdateReport
from rollout_bridge.engines.vllm_fleet import ServedFleet
from rollout_bridge.engines.vllm_pool import VllmPool
from rollout_bridge.engines.vllm_served import ServerFailed
from rollout_bridge.weights.read.update import Update


def update(version: int) -> Update:
    return Update(
        version=version,
        incarnation=1,
        step=version,
        changed=frozenset({"a"}),
        tensor=lambda name: pytest.fail(name),
        mirror=Path("/mirror"),
        verified=1,
    )


class Server:
    """Instead of `ServedVllm`. fails: what the next calls raise, by method. gate: loads wait for it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.server = SimpleNamespace(url=name)
        self.name, self.log = name, log
        self.served: int | None = None
        self.fails: dict[str, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def _did(self, what: str) -> None:
        self.log.append(f"{self.name} {what}")
        if what.split()[0] in self.fails:
            self.served = None
            raise self.fails.pop(what.split()[0])

    async def version(self) -> int | None:
        return self.served

    async def move(self, update: Update) -> UpdateReport:
        await self._did("stops")
        await asyncio.sleep(0)
        await self._did("move")
        self.served = update.version
        return UpdateReport(version=update.version, pause_ms=1.0, total_ms=2.0, tensors=3)

    async def prepare(self, update: Update) -> Path:
        await self._did(f"prepare {update.version}")
        return Path(str(update.version))

    async def load(self, directory: Path) -> None:
        await self.gate.wait()
        await self._did(f"load {directory}")

    async def admit(self, version: int) -> None:
        await self._did(f"admit {version}")
        self.served = version

    async def join(self, update: Update) -> UpdateReport:
        await self._did(f"join {update.version}")
        self.served = update.version
        return UpdateReport(version=update.version, pause_ms=1.0, total_ms=2.0, tensors=3)


def fleet(count: int, **options: Any) -> tuple[ServedFleet, list[Any], list[str]]:
    log: list[str] = []
    servers: list[Any] = [Server(log, name) for name in "abc"[:count]]
    return ServedFleet(servers, **options), servers, log


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_all_may_not_stop_at_once() -> None:
    assert fleet(1)[0].at_once == 1
    assert fleet(3, at_once=2)[0].at_once == 2
    with pytest.raises(ValueError, match="at_once: 2 of 2 servers.*fewer than all"):
        fleet(2, at_once=2)


def test_an_update_rolls_and_a_failure_keeps_the_others_going() -> None:
    async def run() -> None:
        served, (a, b, c), log = fleet(3)
        assert await served.version() is None
        await served.update(update(1))
        await settle()
        if await served.version() is None:  # those that were up after the first
            await served.update(update(1))
        assert [server.served for server in (a, b, c)] == [1, 1, 1]
        log.clear()
        await served.update(update(2))
        assert log == ["a stops", "a move", "b stops", "b move", "c stops", "c move"]

        log.clear()
        b.fails["move"] = EngineError("b broke")
        b.gate.clear()
        with pytest.raises(EngineError, match="b broke"):
            await served.update(update(3))
        assert (a.served, b.served, c.served) == (3, None, 3)
        assert "b prepare 3" in log
        assert await served.version() == 3, "the others are followed while it loads"
        assert (await served.update(update(4))).version == 4
        b.gate.set()
        await settle()
        assert await served.version() is None, "it is up, behind, and waits to be brought to date"
        log.clear()
        await served.update(update(4))
        assert log == ["b join 4"]
        assert await served.version() == 4

    asyncio.run(run())


def test_a_server_that_cannot_be_started_is_tried_again_later_and_is_final_only_if_none_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_fleet, "FIRST_RETRY_SECONDS", 0.01)

    async def run() -> None:
        served, (a, b), log = fleet(2)
        b.gate.clear()
        b.fails["load"] = ServerFailed("no memory")
        await served.update(update(1))
        assert (a.served, b.served) == (1, None)
        b.gate.set()
        await settle()
        with pytest.raises(EngineError, match="no memory"):
            await served.update(update(2))
        assert (a.served, b.served) == (2, None)
        await asyncio.sleep(0.02)
        assert await served.version() is None
        await served.update(update(2))
        await settle()
        await served.update(update(2))
        assert b.served == 2

        alone, (c,), _ = fleet(1)
        c.fails["load"] = ServerFailed("port taken")
        with pytest.raises(ServerFailed, match="port taken"):
            await alone.update(update(1))
        assert log

    asyncio.run(run())


class Asked:
    """Instead of `VllmEngine`: counts what it was asked."""

    def __init__(self, version: int | None, *, ready: bool = True) -> None:
        self.found = Health(ready=ready, version=version, reason="" if ready else "not ready")
        self.asked = 0
        self.answer = asyncio.Event()

    async def health(self) -> Health:
        return self.found

    async def generate(self, requests: list[Request]) -> list[Any]:
        self.asked += len(requests)
        await self.answer.wait()
        return []


def requests(count: int, minimum: int | None = None, affinity: str = "") -> list[Request]:
    return [
        Request(
            request_id="r",
            prompt_ids=[1],
            max_tokens=1,
            temperature=1.0,
            seed=0,
            stop_ids=(),
            minimum_version=minimum,
            affinity=affinity,
        )
    ] * count


def test_a_pool_asks_the_least_busy_server_that_serves_and_is_new_enough() -> None:
    async def run() -> None:
        engines: list[Any] = [Asked(5), Asked(6), Asked(6, ready=False), Asked(None, ready=False)]
        pool = VllmPool(engines)
        calls = []
        for asked in (requests(4), requests(1), requests(2), requests(1, minimum=6)):
            calls.append(asyncio.create_task(pool.generate(asked)))
            await settle()
        assert [engine.asked for engine in engines] == [4, 4, 0, 0]
        assert await pool.version() == 5
        for engine in engines:
            engine.answer.set()
        await asyncio.gather(*calls)
        nobody = VllmPool(engines[3:])
        with pytest.raises(EngineError, match="no server serves: not ready"):
            await nobody.generate(requests(1))
        with pytest.raises(EngineError, match="a pool only asks"):
            await pool.update(update(7))

    asyncio.run(run())


def test_requests_of_one_affinity_go_to_one_server_while_it_serves_as_well_as_any() -> None:
    async def run() -> None:
        engines: list[Any] = [Asked(6), Asked(6)]
        pool = VllmPool(engines)
        calls = []

        async def ask(affinity: str) -> list[int]:
            calls.append(asyncio.create_task(pool.generate(requests(1, affinity=affinity))))
            await settle()
            return [engine.asked for engine in engines]

        assert await ask("a") == [1, 0]
        assert await ask("b") == [1, 1], "the least busy one for a new affinity"
        assert [await ask("a"), await ask("a")] == [[2, 1], [3, 1]]
        engines[0].found = Health(ready=False, version=6, reason="paused")
        assert await ask("a") == [3, 2], "the one that is not paused, though its cache is empty"
        for engine in engines:
            engine.answer.set()
        await asyncio.gather(*calls)

    asyncio.run(run())
