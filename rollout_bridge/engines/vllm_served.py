"""A `RolloutEngine` that owns its vLLM server: starts it from a mirror, updates it, and starts it anew.

Invariant: a server is served from only if it loaded a directory materialised from the mirror and every update
since then succeeded. After a failed update, a death or silence `version()` is None; the sync agent then hands
over the whole mirror, verified, and `update` starts a server from a fresh directory of it.

A server that loads has no version until it is admitted, so clients wait for it. `update` does all of it; a
fleet takes the steps `prepare`, `load` and `admit` or `join` one by one, its other servers go on meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rollout_bridge.engines.protocol import (
    Completion,
    EngineError,
    Health,
    KvPolicy,
    Request,
    UpdateMode,
    UpdateReport,
)
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
from rollout_bridge.errors import ExpectedError
from rollout_bridge.files import write_whole
from rollout_bridge.weights.read.materialize import EngineFormat, materialize
from rollout_bridge.weights.read.mirror_view import MirrorView
from rollout_bridge.weights.read.update import Update

logger = logging.getLogger(__name__)

RESTART_ATTEMPTS = 3
ANSWER_SECONDS = 60.0
MISSED_ANSWERS = 3


class ServerFailed(ExpectedError):
    """The server cannot be started; the message names port, log and remedy. Not worth another attempt."""


class ServedVllm:
    """A vLLM server and its files.

    directory: holds `engine/` (materialised versions), `vllm.log` and, while a server admits requests,
    `ready.json` {"url", "pid", "version", "kv_policy"}: the version it was admitted with, not the current.
    materialized: where directories for the server are written, `directory/engine` by default; servers of one
        mirror may share it. loaded: what each server, by URL, loads from there, shared by them too: the rest
        may be removed.
    """

    name = "vllm"

    def __init__(
        self,
        settings: VllmServerSettings,
        directory: Path,
        *,
        kv_policy: KvPolicy,
        engine_format: EngineFormat,
        update_mode: UpdateMode = UpdateMode.IN_FLIGHT,
        materialized: Path | None = None,
        loaded: dict[str, Path] | None = None,
    ) -> None:
        self.server = VllmServer(settings, directory / "vllm.log")
        self.starts = 0
        self._directory = directory
        self._format: EngineFormat = engine_format
        self._kv_policy = kv_policy
        self._materialized = materialized or directory / "engine"
        self._loaded = {} if loaded is None else loaded
        self._engine = VllmEngine(
            self.server.url,
            kv_policy=kv_policy,
            update_mode=update_mode,
            request_timeout=settings.request_timeout,
            update_timeout=settings.update_timeout,
        )
        self._serving = False
        self._missed = 0
        self._failed_starts = 0
        self._ready_file.unlink(missing_ok=True)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return await self._engine.generate(requests)

    async def version(self) -> int | None:
        """None when there is no server to trust. A server that does not answer three times is given up."""
        if self._serving and not self.server.alive:
            self._give_up(f"its server ended; from {self.server.log}:\n{self.server.excerpt()}")
        if not self._serving:
            return None
        try:
            # Not wait_for: until Python 3.12 it loses a cancellation that comes with the answer.
            async with asyncio.timeout(ANSWER_SECONDS):
                version = await self._engine.version()
        except (EngineError, TimeoutError) as error:
            self._missed += 1
            if self._missed < MISSED_ANSWERS and self.server.alive:
                raise EngineError(f"vLLM at {self.server.url}: no answer ({error}); asking again") from error
            self._give_up(f"no answer {self._missed} times ({error})")
            return None
        self._missed = 0
        return version

    async def update(self, update: Update) -> UpdateReport:
        """Update the server in flight; or start one from the mirror if there is none to trust.

        Raises `EngineError` if the update fails (the next call starts anew), `ServerFailed` if no server can
        be started. After a start `pause_ms` is how long that took.
        """
        if not (self._serving and self.server.alive):
            return await self._start(update)
        return await self.move(update)

    async def move(self, update: Update) -> UpdateReport:
        """Update the running server. Raises `EngineError`; the server is given up then."""
        try:
            return await self._engine.update(update)
        except BaseException:
            self._give_up(f"the update to version {update.version} failed")
            raise

    async def health(self) -> Health:
        if not self._serving:
            return Health(ready=False, version=None, reason=f"vLLM at {self.server.url}: no server yet")
        return await self._engine.health()

    async def close(self) -> None:
        """Stop the server with all its processes."""
        self._serving = False
        self._ready_file.unlink(missing_ok=True)
        await self._engine.close()
        await self.server.stop()

    @property
    def _ready_file(self) -> Path:
        return self._directory / "ready.json"

    def _give_up(self, reason: str) -> None:
        logger.error("vLLM at %s: %s. It will be started anew from the mirror", self.server.url, reason)
        self._serving = False
        self._ready_file.unlink(missing_ok=True)

    async def prepare(self, update: Update) -> Path:
        """Stops what runs and writes the directory to load; the mirror must hold still so long.

        Raises `EngineError` if the mirror holds another version.
        """
        await self.server.stop()
        directory = await asyncio.to_thread(self._materialize, update)
        self._loaded[self.server.url] = directory
        await asyncio.to_thread(self._remove_unused)
        return directory

    async def load(self, directory: Path) -> None:
        """Starts a server from what `prepare` wrote. It is up then, warm, and admits nothing yet.

        Raises `EngineError`, `ServerFailed` for a first start or the last of three in a row that fail.
        """
        try:
            await self.server.start(directory, None)
            self._engine.restarted()
            await self._engine.warm_up()
        except EngineError as error:
            await self.server.stop()
            self._failed_starts += 1
            if self.starts == 0 or self._failed_starts >= RESTART_ATTEMPTS:
                raise ServerFailed(str(error)) from error
            raise
        self.starts += 1
        self._failed_starts = self._missed = 0

    async def admit(self, version: int) -> None:
        """Serve what was loaded: it is `version`, and the newest there is."""
        await self._engine.set_version(version)
        self._serving = True
        self._write_ready(version)

    async def join(self, update: Update) -> UpdateReport:
        """Bring what was loaded to the version of `update`, every tensor of it, and serve.

        Raises `EngineError`; the server is given up then.
        """
        everything = MirrorView.open(update.mirror).specs
        try:
            report = await self._engine.update(dataclasses.replace(update, changed=frozenset(everything)))
        except BaseException:
            self._give_up(f"it could not be brought to version {update.version}")
            raise
        self._serving = True
        self._write_ready(update.version)
        return report

    async def _start(self, update: Update) -> UpdateReport:
        began = time.perf_counter()
        await self.load(await self.prepare(update))
        await self.admit(update.version)
        elapsed_ms = (time.perf_counter() - began) * 1e3
        return UpdateReport(
            version=update.version, pause_ms=elapsed_ms, total_ms=elapsed_ms, tensors=len(update.changed)
        )

    def _materialize(self, update: Update) -> Path:
        view = MirrorView.open(update.mirror)
        if view.version != update.version:
            raise EngineError(
                f"mirror {update.mirror}: holds version {view.version}, the update is to {update.version}: "
                "the mirror moved before the engine had taken the update; hand over its current version"
            )
        return materialize(view, self._materialized, self._format)

    def _remove_unused(self) -> None:
        kept = set(self._loaded.values())
        for other in self._materialized.iterdir():
            if other not in kept:
                shutil.rmtree(other)

    def _write_ready(self, version: int) -> None:
        content = {
            "url": self.server.url,
            "pid": self.server.pid,
            "version": version,
            "kv_policy": self._kv_policy.value,
        }
        write_whole(self._ready_file, json.dumps(content))
