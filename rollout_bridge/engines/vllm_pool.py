"""Client of the several vLLM servers of one host: each call goes to one that serves and has the least to do.

The requests of a call stay together, and go to the server that had the last call of their affinity while it
serves as well as any: members of a group share their prompt's prefix in that server's cache.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from rollout_bridge.engines.protocol import Completion, EngineError, Health, Request, UpdateReport
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.weights.read.update import Update

REMEMBERED = 4096  # affinities; more groups than are ever in flight


class VllmPool:
    """A `RolloutEngine` for rollout workers; the servers' agent updates them."""

    name = "vllm pool"

    def __init__(self, engines: Sequence[VllmEngine]) -> None:
        self._engines = list(engines)
        self._running = [0] * len(self._engines)
        self._servers: OrderedDict[str, int] = OrderedDict()  # by affinity

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """By the least busy server that is not paused, of those at the newest version if one is asked for.

        Raises `EngineError` if none serves, or the chosen one failed.
        """
        affinity = requests[0].affinity if requests else ""
        wanted = max((request.minimum_version or 0 for request in requests), default=0)
        chosen = await self._choose(wanted, affinity)
        self._running[chosen] += len(requests)
        try:
            return await self._engines[chosen].generate(requests)
        finally:
            self._running[chosen] -= len(requests)

    async def update(self, update: Update) -> UpdateReport:
        raise EngineError(
            f"vllm pool: update to version {update.version}: a pool only asks; `jaxtrain serve` of this host "
            "updates its servers"
        )

    async def version(self) -> int | None:
        """The lowest that is served, None if nothing is."""
        found = [health.version for health in await self._healths() if health.version is not None]
        return min(found, default=None)

    async def health(self) -> Health:
        """Ready if one server is."""
        found = await self._healths()
        ready = [health.version for health in found if health.ready and health.version is not None]
        reason = "; ".join(health.reason for health in found if not health.ready)
        return Health(ready=bool(ready), version=min(ready, default=None), reason=reason)

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))

    async def _healths(self) -> list[Health]:
        return list(await asyncio.gather(*(engine.health() for engine in self._engines)))

    async def _choose(self, wanted: int, affinity: str) -> int:
        found = await self._healths()
        up = [number for number, health in enumerate(found) if health.version is not None]
        if not up:
            raise EngineError("vllm pool: no server serves: " + "; ".join(h.reason for h in found))

        def burden(number: int) -> tuple[bool, bool, bool, int]:
            version, known = found[number].version or 0, self._servers.get(affinity)
            return (version < wanted, not found[number].ready, number != known, self._running[number])

        chosen = min(up, key=burden)
        if affinity:
            self._servers[affinity] = chosen
            self._servers.move_to_end(affinity)
            if len(self._servers) > REMEMBERED:
                self._servers.popitem(last=False)
        return chosen
