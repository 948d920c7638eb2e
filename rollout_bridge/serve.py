"""`jaxtrain serve`: the vLLM servers of this host, which follow a run's policy, in one call."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rollout_bridge.agent import AgentSettings, SyncAgent
from rollout_bridge.engines.protocol import EngineError, KvPolicy, RolloutEngine, UpdateMode
from rollout_bridge.engines.vllm_fleet import ServedFleet
from rollout_bridge.engines.vllm_served import ServedVllm, ServerFailed
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
from rollout_bridge.errors import ExpectedError
from rollout_bridge.store import Store
from rollout_bridge.waiting import looks, wait_for_async
from rollout_bridge.weights.format.chain import read_latest
from rollout_bridge.weights.format.manifest import LATEST_KEY
from rollout_bridge.weights.read.materialize import EngineFormat

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PORT_SECONDS = 30.0
CPU_KV_CACHE_GIB = 1.0


class ServeError(ExpectedError):
    """Serving cannot begin or go on; says where, and what to do."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The servers of one host.

    store: URL of the run. state_directory: mirror, engine directories, log and `ready.json` of this host; of
        several servers the last two are in `0/`, `1/` and so on.
    first_version_timeout: seconds to wait for the run's first version.
    engine_format: what the server loads: "fp8" codes and scales, "bf16" the same numbers, "auto" FP8 on a GPU
        that multiplies it (compute capability 8.9) and BF16 elsewhere.
    server: what all servers have in common. Its `kv_cache_gib` None is 1 GiB on a CPU, `cpu_threads` are the
        cores of all servers ("0-15" or "0,1"), `port` is the first one's, and `enforce_eager` and
        `chunked_prefill` are set by whether there is a GPU.
    servers: how many, each with its share of the cores or GPUs; at_once: how many of them an update may stop
        at a time.
    """

    store: str
    state_directory: Path
    agent_id: str
    server: VllmServerSettings = VllmServerSettings()
    servers: int = 1
    at_once: int = 1
    kv_policy: KvPolicy = KvPolicy.KEEP
    update_mode: UpdateMode = UpdateMode.IN_FLIGHT
    engine_format: Literal["auto", "fp8", "bf16"] = "auto"
    first_version_timeout: float = 1800.0
    agent: AgentSettings = AgentSettings()


def serve(settings: ServeSettings) -> None:
    """Serves until the run is finished, or SIGTERM or SIGINT comes; then the server's processes are gone.

    Raises `ServeError` (no version in time, no server), `EngineError` (port taken, host not loopback),
    `StoreError`, `AgentError` (trouble that lasts).
    """
    asyncio.run(_serve(settings))


async def _serve(settings: ServeSettings) -> None:
    gpus, multiplies_fp8 = _accelerators()
    servers = [server_settings(settings, gpus=gpus, number=number) for number in range(settings.servers)]
    settings.state_directory.mkdir(parents=True, exist_ok=True)
    # A taken port is found before anything is fetched.
    await free_ports([VllmServer(server, settings.state_directory / "vllm.log") for server in servers])
    store = await asyncio.to_thread(Store.open, settings.store)
    engine_format: EngineFormat = "fp8" if multiplies_fp8 else "bf16"
    if settings.engine_format != "auto":
        engine_format = settings.engine_format
    engine = _engine(settings, servers, engine_format)
    agent = SyncAgent(
        store, settings.state_directory / "mirror", engine, settings.agent_id, settings=settings.agent
    )

    async def follow() -> None:
        await wait_for_first_version(store, timeout=settings.first_version_timeout)
        await agent.run()

    following = asyncio.create_task(follow())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, following.cancel)
    try:
        await following
        logger.info("the run is finished; %s stops", settings.agent_id)
    except asyncio.CancelledError:
        logger.info("stopped by a signal")
    except ServerFailed as error:
        raise ServeError(str(error)) from error
    finally:
        await engine.close()


async def free_ports(servers: Sequence[VllmServer]) -> None:
    """Returns once the ports of `servers` are free: a server whose agent was killed takes a while to end.

    Raises `EngineError` naming a port that is taken for `PORT_SECONDS`.
    """
    waiting = list(servers)
    for pause in looks(PORT_SECONDS, POLL_SECONDS):
        with suppress(EngineError):
            while waiting:
                waiting[0].check_port()
                waiting.pop(0)
            return
        await asyncio.sleep(pause)
    for server in waiting:
        server.check_port()


def _engine(
    settings: ServeSettings, servers: list[VllmServerSettings], engine_format: EngineFormat
) -> RolloutEngine:
    """One server, or a fleet that shares what is materialised."""
    loaded: dict[str, Path] = {}
    directories = [settings.state_directory / str(number) for number in range(len(servers))]
    served = [
        ServedVllm(
            server,
            directory if len(servers) > 1 else settings.state_directory,
            kv_policy=settings.kv_policy,
            update_mode=settings.update_mode,
            engine_format=engine_format,
            materialized=settings.state_directory / "engine",
            loaded=loaded,
        )
        for server, directory in zip(servers, directories, strict=True)
    ]
    return served[0] if len(served) == 1 else ServedFleet(served, at_once=settings.at_once)


async def wait_for_first_version(store: Store, *, timeout: float) -> None:
    """Returns once the chain has a version. `ServeError` naming store and key after `timeout` seconds."""

    async def look() -> object:
        latest = await asyncio.to_thread(read_latest, store)
        return latest.manifest if latest is not None else None

    await wait_for_async(
        look,
        f"a policy version in {store.url} ({LATEST_KEY} names none). Start the trainer of this run, see that "
        "both use the same store, or wait longer",
        timeout=timeout,
        poll=POLL_SECONDS,
        error=ServeError,
    )


def server_settings(settings: ServeSettings, *, gpus: Sequence[str], number: int = 0) -> VllmServerSettings:
    """What server `number` is started with.

    gpus: ids of this host's, as CUDA_VISIBLE_DEVICES takes them; none on a CPU host.
    Raises `ServeError` if the servers need more than there are, or expert choices without one.
    """
    on_gpu, server = bool(gpus), settings.server
    ranks = server.tensor_parallel * server.data_parallel
    environment, cpu_threads = dict(server.environment), server.cpu_threads
    if server.return_routed_experts and not on_gpu:
        raise ServeError(
            "rollouts.capture_routed_experts: vLLM sends expert choices from a GPU only, and this host has "
            "none; set it to false, or rollouts.engine to embedded"
        )
    if on_gpu and settings.servers > 1:
        own = gpus[number * ranks : (number + 1) * ranks]
        if len(own) < ranks:
            raise ServeError(
                f"{settings.servers} servers of {ranks} ranks need {settings.servers * ranks} GPUs, this "
                f"host has {len(gpus)}: lower rollouts.servers or the ranks of each"
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    elif not on_gpu and settings.servers * ranks > 1 and cpu_threads != "auto":
        shares = cpu_shares(parse_cores(cpu_threads), settings.servers * ranks)
        cpu_threads = "|".join(shares[number * ranks : (number + 1) * ranks])
    kv_cache_gib = server.kv_cache_gib
    if kv_cache_gib is None and not on_gpu:
        kv_cache_gib = CPU_KV_CACHE_GIB
    return replace(
        server,
        port=server.port + number,
        kv_cache_gib=kv_cache_gib,
        enforce_eager=not on_gpu,
        chunked_prefill=on_gpu,
        cpu_threads=cpu_threads,
        environment=environment,
    )


def parse_cores(text: str) -> list[int]:
    """Cores of "0-3,8"."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def cpu_shares(cores: Sequence[int], ranks: int) -> list[str]:
    """Cores of each rank, neighbours together; with fewer cores than ranks they take turns."""
    if len(cores) < ranks:
        return [str(cores[rank % len(cores)]) for rank in range(ranks)]
    edges = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return [",".join(map(str, cores[a:b])) for a, b in zip(edges, edges[1:], strict=False)]


def _accelerators() -> tuple[list[str], bool]:
    """(ids of the GPUs that torch can use, they multiply FP8)."""
    import torch

    if not torch.cuda.is_available():
        return [], False
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return visible.split(","), torch.cuda.get_device_capability() >= (8, 9)
