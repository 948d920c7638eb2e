"""One sync agent for each host: follows the head, gives the engine every verified version, acknowledges it.

One loop reads the state again each time: what the engine serves, what the mirror holds, what is pinned, what
is published. So after a crash at any point it is enough to start the loop again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rollout_bridge.control import Ack, read_state
from rollout_bridge.engines.protocol import EngineError, RolloutEngine
from rollout_bridge.errors import ExpectedError
from rollout_bridge.store import Store, StoreError
from rollout_bridge.threads import finished_in_thread
from rollout_bridge.waiting import Unchanged
from rollout_bridge.weights.format.manifest import BrokenVersion
from rollout_bridge.weights.format.pins import pins_of
from rollout_bridge.weights.format.run import RunError
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import MirrorError
from rollout_bridge.weights.read.subscriber import Subscriber
from rollout_bridge.weights.read.update import Update

logger = logging.getLogger(__name__)

_PAUSES_KEPT = 64
# Errors that may end while the agent waits. OSError: a full disk or a lost connection.
_TROUBLE = (StoreError, RunError, BrokenVersion, MirrorError, EngineError, OSError)


class AgentError(ExpectedError):
    """The agent gave up; the message names the agent, the last reason and the remedy."""


def agent_name(directory: Path, name: str) -> str:
    """The id of the agent whose mirror is in `directory`: `name`, this host's name, and random digits.

    Written to `directory/agent_id` once, so that a restart has the same one and no other host does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
    path = directory / "agent_id"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{name}-{host}-{uuid.uuid4().hex[:6]}")
    except FileExistsError:
        pass
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Seconds. poll: between looks at the head. heartbeat: between acknowledgements when nothing moves.

    patience: how long failures may last without a success (no run yet, store or head out of reach, engine
        refusing updates) before the agent gives up.
    retry: first pause after a failure, doubled up to 30 times `poll`.
    decoders: processes that decode and verify a large model; None: one for each core, up to 64.
    """

    poll: float = 1.0
    heartbeat: float = 30.0
    patience: float = 1800.0
    retry: float = 0.5
    decoders: int | None = None


class SyncAgent:
    """Keeps `engine` at the head of the chain in `store`, through a mirror in `mirror_dir`."""

    def __init__(
        self,
        store: Store,
        mirror_dir: str | Path,
        engine: RolloutEngine,
        agent_id: str,
        *,
        settings: AgentSettings | None = None,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", agent_id):
            raise ValueError(f"agent_id: {agent_id!r} is not made of letters, digits, _ and -")
        self.store = store
        self.engine = engine
        self.agent_id = agent_id
        self.errors = 0
        self.last_error = ""
        self.updates = 0
        self.verified_tensors = 0
        self._mirror_dir = Path(mirror_dir)
        self._settings = settings or AgentSettings()
        self._pauses: deque[float] = deque(maxlen=_PAUSES_KEPT)
        self._failing_since: float | None = None
        self._failures = 0
        self._acknowledged = 0.0
        self._engine_suspect = False
        self._unchanged = Unchanged()

    async def run(self) -> None:
        """Serves until the run is finished and its head is served.

        Raises `AgentError` when trouble outlasts `patience`, `MirrorError` if another agent owns the mirror.
        """
        mirror = await finished_in_thread(lambda: Mirror(self._mirror_dir))
        subscriber = Subscriber(self.store, mirror, name=self.agent_id, decoders=self._settings.decoders)
        try:
            while True:
                try:
                    moved = await self._round(subscriber)
                    finished = not moved and await self._finished(subscriber)
                    if finished:
                        await self._acknowledge(subscriber)
                except _TROUBLE as error:
                    await self._failed(error, subscriber)
                    continue
                self._failing_since, self._failures = None, 0
                if finished:
                    return
                if not moved:
                    await asyncio.sleep(self._settings.poll)
        finally:
            subscriber.close()
            mirror.close()

    async def _round(self, subscriber: Subscriber) -> bool:
        """Reads the state once and updates the engine if needed; whether the engine moved."""
        mirror = subscriber.mirror
        served = await self.engine.version()
        if served is None or served != mirror.version or self._engine_suspect:
            # The engine holds no valid version: advance the mirror first, then load every tensor.
            update = await finished_in_thread(lambda: self._renewed(subscriber))
        else:
            update = await finished_in_thread(lambda: subscriber.advance(self._target(subscriber, served)))
        if update is not None:
            await self._serve(update)
            await self._acknowledge(subscriber)
        elif time.monotonic() - self._acknowledged > self._settings.heartbeat:
            await self._acknowledge(subscriber)
        return update is not None

    def _renewed(self, subscriber: Subscriber) -> Update | None:
        """All of the newest version; of the version in the mirror while the store is out of reach."""
        held = subscriber.mirror.version
        try:
            target = self._target(subscriber, held)
        except StoreError:
            target = held
        return subscriber.renew(target)

    async def _serve(self, update: Update) -> None:
        """Updates the engine. After a failure it gets all tensors again: it may hold part of the update."""
        self._engine_suspect = True
        report = await self.engine.update(update)
        if report.version != update.version:
            raise EngineError(
                f"{self.engine.name}: reports version {report.version} after an update to {update.version}"
            )
        self._engine_suspect = False
        self.updates += 1
        self.verified_tensors += update.verified
        self._pauses.append(report.pause_ms)

    def _target(self, subscriber: Subscriber, served: int | None) -> int:
        """The version to move to: the lowest pinned one not passed yet, else the head, 0 without one.

        The head is read first: a version is pinned before the next one is published, so a pin that is added
        meanwhile is never of a version before this head.
        """
        latest = subscriber.latest()
        pins = [pin.version for pin in pins_of(self.store, self.agent_id, unchanged=self._unchanged)]
        ahead = [version for version in pins if served is None or version >= served]
        return min(ahead, default=0 if latest is None else latest.version)

    async def _finished(self, subscriber: Subscriber) -> bool:
        state = await finished_in_thread(lambda: read_state(self.store))
        if state is None or not state.finished:
            return False
        latest = await finished_in_thread(subscriber.latest)
        return latest is None or latest.version == (subscriber.mirror.version or 0)

    async def _acknowledge(self, subscriber: Subscriber) -> None:
        state = subscriber.mirror.state
        ack = Ack(
            agent=self.agent_id,
            version=state.ref.version if state else None,
            incarnation=state.ref.incarnation if state else None,
            time=time.time(),
            updates=self.updates,
            pause_ms=tuple(self._pauses),
            verified_tensors=self.verified_tensors,
            fallbacks=subscriber.fallbacks,
            setbacks=subscriber.setbacks,
            broken_versions=len(subscriber.broken),
            errors=self.errors,
            last_error=self.last_error,
        )
        await finished_in_thread(lambda: self.store.put_json(ack.key, ack.to_json()))
        self._acknowledged = time.monotonic()

    async def _failed(self, error: Exception, subscriber: Subscriber) -> None:
        """Counts, logs and reports a failure, then waits. Raises `AgentError` past `patience`."""
        self.errors += 1
        self.last_error = str(error)[:500]
        self._failures += 1
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        lasted = now - self._failing_since
        logger.warning("agent %s: failure %d: %s", self.agent_id, self._failures, error)
        if lasted > self._settings.patience:
            raise AgentError(
                f"agent {self.agent_id}: no success for {lasted:.0f} s, {self._failures} failures. Last: "
                f"{error}. Repair that and start the agent again; its mirror is kept"
            ) from error
        if now - self._acknowledged > self._settings.heartbeat:
            try:
                await self._acknowledge(subscriber)
            except (StoreError, OSError) as unreported:
                logger.warning("agent %s: cannot report it: %s", self.agent_id, unreported)
        pause = self._settings.retry * 2 ** min(self._failures - 1, 10)
        await asyncio.sleep(min(pause, 30 * self._settings.poll))
