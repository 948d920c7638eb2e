"""An update of several workers: no pause before all have staged, no version before all have loaded."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rollout_bridge.engines.protocol import EngineError, UpdateReport
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.weights.read.update import Update

UPDATE = Update(
    version=7,
    incarnation=1,
    step=7,
    changed=frozenset({"a"}),
    tensor=lambda name: pytest.fail(f"{name}: the client reads no tensor"),
    mirror=Path("/mirror"),
    verified=1,
)


class Workers:
    """Two workers behind one server. late: seconds the second takes to stage; second: what it says then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, late: float = 0.0, **second: Any) -> None:
        self.calls: list[str] = []
        self.engine = VllmEngine("http://127.0.0.1:1", update_timeout=600.0)
        self._late, self._second = late, second
        self._tasks: list[asyncio.Task[None]] = []
        monkeypatch.setattr(self.engine, "_call", self.call)

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        del method, options
        self.calls.append(path.partition("?")[0])
        if path == "/get_world_size":
            return {"world_size": 2}
        if path == "/collective_rpc":
            self.reports = Path(json.loads(body["args"][0])["reports"])
            self._tasks.append(asyncio.create_task(self.stage()))
            return {"results": [{}]}
        if path == "/finish_weight_update":
            for rank, load_ms in enumerate((3.0, 4.0)):
                self.report("loaded", rank, version=7, load_ms=load_ms)
        return {}

    async def stage(self) -> None:
        ready = {"version": 7, "state": "ready", "tensors": 2}
        self.report("staged", 0, **ready)
        await asyncio.sleep(self._late)
        self.calls.append("second staged")
        self.report("staged", 1, **(ready | self._second))

    def report(self, what: str, rank: int, **content: Any) -> None:
        (self.reports / "tmp").write_text(json.dumps(content))
        (self.reports / "tmp").rename(self.reports / f"{what}-{rank}.json")

    def update(self) -> UpdateReport:
        return asyncio.run(self.engine.update(UPDATE))


def test_the_pause_begins_when_the_last_worker_has_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(monkeypatch, late=0.2)
    report = workers.update()
    assert (report.version, report.tensors, report.load_ms) == (7, 2, 4.0)
    assert workers.calls[-6:] == [
        "second staged",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]


def test_a_cancelled_update_is_cancelled_whatever_a_worker_reports_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Just before the reports are removed the second worker says that it has staged."""
    workers = Workers(monkeypatch, late=3600.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove = os.rmdir

    def reported(path: Any, **options: Any) -> None:
        workers.report("staged", 1)
        remove(path, **options)

    async def cancelled() -> None:
        asked = asyncio.create_task(workers.engine.update(UPDATE))
        while "/get_world_size" not in workers.calls:  # then it waits for both
            await asyncio.sleep(0.001)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", reported)
            asked.cancel()
            await asyncio.wait([asked])
        assert asked.cancelled()
        assert (workers.reports / "staged-1.json").exists()

    asyncio.run(cancelled())


@pytest.mark.parametrize("said", [{"state": "failed", "error": "no such tensor"}, {"version": 6}])
def test_one_worker_that_did_not_stage_stops_the_update_of_all(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    workers = Workers(monkeypatch, **said)
    with pytest.raises(EngineError, match="version 7 failed.*a worker reports"):
        workers.update()
    assert "/pause" not in workers.calls
    with pytest.raises(EngineError, match="restart the server"):
        workers.update()
