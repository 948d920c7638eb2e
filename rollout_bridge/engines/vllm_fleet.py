"""Several vLLM servers of one host as one `RolloutEngine`, from one mirror: updates roll over them.

Invariants. Every server that serves is at the version of the last `update`, or is given up. At most `at_once`
servers are updated at a time, so the others make tokens. The mirror is read only inside `update`, while its
owner holds still; a server that starts loads from a directory meanwhile, may be behind when it is up, and is
brought to date before it admits a request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_bridge.engines.protocol import Completion, EngineError, Health, Request, UpdateReport
from rollout_bridge.engines.vllm_served import ServedVllm, ServerFailed
from rollout_bridge.weights.update import Update

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 5.0
LAST_RETRY_SECONDS = 600.0


@dataclass(eq=False)
class Member:
    """One server. loading: its start, from files of `version`. failures: starts in a row that failed,
    the last with `error`; the next is at `retry_at`.
    """

    engine: ServedVllm
    loading: asyncio.Task[None] | None = None
    version: int | None = None
    failures: int = 0
    error: BaseException | None = None
    retry_at: float = 0.0

    @property
    def up(self) -> bool:
        """A start has ended, well or not, and `update` has not dealt with it yet."""
        return self.loading is not None and self.loading.done()

    @property
    def due(self) -> bool:
        """Neither serving nor loading, and time to start."""
        return self.loading is None and time.monotonic() >= self.retry_at


class ServedFleet:
    """Owns its servers. at_once: how many may be in an update at a time; of several, never all."""

    name = "vllm fleet"

    def __init__(self, servers: Sequence[ServedVllm], *, at_once: int = 1) -> None:
        if not servers or not 1 <= at_once <= max(1, len(servers) - 1):
            raise ValueError(
                f"at_once: {at_once} of {len(servers)} servers; expected at least 1 and fewer than all, so "
                "that the fleet never stops at once"
            )
        self.members = [Member(server) for server in servers]
        self.at_once = at_once
        self._turn = itertools.count()

    async def version(self) -> int | None:
        """The version of all servers that serve; None if none does, or one has to be started or updated."""
        served = await self._serving()
        if any(member.up or member.due for member in self.members if member not in served):
            return None
        return min(served.values(), default=None)

    async def update(self, update: Update) -> UpdateReport:
        """Roll `update` over the servers, take in those that are up, start those that are down.

        Returns when all that served before are at its version; with none serving, when the first one is.
        Raises `EngineError` naming what failed (the other servers have been updated), `ServerFailed` if none
        serves and none can be started.
        """
        began = time.perf_counter()
        served = await self._serving()
        errors: list[str] = []
        reports: list[UpdateReport] = []
        behind = [member for member, version in served.items() if version != update.version]
        for start in range(0, len(behind), self.at_once):
            group = behind[start : start + self.at_once]
            for outcome in await asyncio.gather(*(self._move(member, update) for member in group)):
                if isinstance(outcome, UpdateReport):
                    reports.append(outcome)
                else:
                    errors.append(outcome)
        serving = await self._serving()
        for member in self.members:
            if member.up:
                errors += await self._take_in(member, update)
            elif member not in serving and member.due:
                await self._begin(member, update)
        while not await self._serving():
            errors += await self._first(update)
        if errors:
            raise EngineError(f"vllm fleet of {len(self.members)}: " + "; ".join(errors))
        total_ms = (time.perf_counter() - began) * 1e3
        return UpdateReport(
            version=update.version,
            pause_ms=max((report.pause_ms for report in reports), default=0.0 if served else total_ms),
            total_ms=total_ms,
            tensors=max((report.tensors for report in reports), default=len(update.changed)),
            load_ms=max((report.load_ms for report in reports), default=0.0),
        )

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """By the servers in turn. Raises `EngineError` if none serves."""
        served = list(await self._serving())
        if not served:
            raise EngineError("vllm fleet: no server serves; its agent starts them, see their logs")
        return await served[next(self._turn) % len(served)].engine.generate(requests)

    async def health(self) -> Health:
        """Ready if one server is; says which are not."""
        found = [await member.engine.health() for member in self.members]
        ready = [health for health in found if health.ready]
        return Health(
            ready=bool(ready),
            version=min((health.version for health in ready if health.version is not None), default=None),
            reason="; ".join(health.reason for health in found if not health.ready),
            metrics={"servers": float(len(found)), "servers_ready": float(len(ready))},
        )

    async def close(self) -> None:
        """Stop all servers, those that are starting too."""
        loading = [member.loading for member in self.members if member.loading is not None]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self.members))

    async def _serving(self) -> dict[Member, int]:
        """Versions of the servers that serve. Raises `EngineError` if one is silent and not yet given up."""
        found = {}
        for member in self.members:
            version = None if member.loading is not None else await member.engine.version()
            if version is not None:
                found[member] = version
        return found

    async def _move(self, member: Member, update: Update) -> UpdateReport | str:
        """The report of its update, or the error that takes it out of service."""
        try:
            return await member.engine.move(update)
        except EngineError as error:
            return str(error)

    async def _begin(self, member: Member, update: Update) -> None:
        directory = await member.engine.prepare(update)
        member.version = update.version
        member.loading = asyncio.create_task(member.engine.load(directory))

    async def _take_in(self, member: Member, update: Update) -> list[str]:
        """Serve from a server whose start has ended, at the version of `update`; or what went wrong."""
        loading, member.loading = member.loading, None
        assert loading is not None
        try:
            await loading
            if member.version == update.version:
                await member.engine.admit(update.version)
            else:
                await member.engine.join(update)
        except (EngineError, ServerFailed) as error:
            member.error = error
            member.failures += 1
            pause = min(FIRST_RETRY_SECONDS * 2 ** (member.failures - 1), LAST_RETRY_SECONDS)
            member.retry_at = time.monotonic() + pause
            logger.error("vLLM at %s: start %d failed: %s", member.engine.server.url, member.failures, error)
            return [str(error)]
        member.failures, member.error = 0, None
        logger.info("vLLM at %s: serves version %d", member.engine.server.url, update.version)
        return []

    async def _first(self, update: Update) -> list[str]:
        """Waits for one of the starts to end, while no server serves. Raises when none is left."""
        loading = [member.loading for member in self.members if member.loading is not None]
        if not loading:
            errors = [member.error for member in self.members if member.error is not None]
            final = all(isinstance(error, ServerFailed) for error in errors)
            raise (ServerFailed if final else EngineError)("; ".join(map(str, errors)))
        await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)
        errors = []
        for member in self.members:
            if member.up:
                errors += await self._take_in(member, update)
        return errors
