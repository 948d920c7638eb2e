"""`jaxtrain serve`: a vLLM server on this host that follows a run's policy, in one call."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollout_bridge.engines.protocol import KvPolicy
from rollout_bridge.engines.vllm_served import ServedVllm, ServerFailed
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
from rollout_bridge.store import Store
from rollout_bridge.weights.agent import AgentSettings, SyncAgent
from rollout_bridge.weights.chain import read_latest
from rollout_bridge.weights.manifest import LATEST_KEY
from rollout_bridge.weights.materialize import EngineFormat

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
CPU_KV_CACHE_GIB = 1.0


class ServeError(RuntimeError):
    """Serving cannot begin or go on; says where, and what to do."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """store: URL of the run. state_directory: mirror, engine directories, log and `ready.json` of this host.

    first_version_timeout: seconds to wait for the run's first version. startup_timeout: seconds for a server
        to become healthy.
    engine_format: what the server loads: "fp8" codes and scales, "bf16" the same numbers, "auto" FP8 on a GPU
        that multiplies it (compute capability 8.9) and BF16 elsewhere.
    kv_cache_gib: memory for keys and values; None is 1 GiB on a CPU, and what is free on a GPU.
    moe_routing: have the server send expert choices (GPU only).
    cpu_threads: cores of the server, as "0-15"; "auto" takes all it may.
    """

    store: str
    state_directory: Path
    agent_id: str
    host: str = "127.0.0.1"
    port: int = 8000
    kv_policy: KvPolicy = KvPolicy.KEEP
    engine_format: Literal["auto", "fp8", "bf16"] = "auto"
    max_model_len: int = 4096
    max_num_seqs: int = 64
    dtype: str = "bfloat16"
    kv_cache_gib: float | None = None
    startup_timeout: float = 600.0
    first_version_timeout: float = 1800.0
    cpu_threads: str = "auto"
    moe_routing: bool = False
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    agent: AgentSettings = AgentSettings()


def serve(settings: ServeSettings) -> None:
    """Serves until the run is finished, or SIGTERM or SIGINT comes; then the server's processes are gone.

    Raises `ServeError` (no version in time, no server), `EngineError` (port taken, host not loopback),
    `StoreError`, `AgentError` (trouble that lasts).
    """
    asyncio.run(_serve(settings))


async def _serve(settings: ServeSettings) -> None:
    on_gpu, multiplies_fp8 = _accelerator()
    server = server_settings(settings, on_gpu=on_gpu)
    settings.state_directory.mkdir(parents=True, exist_ok=True)
    # A taken port is found before anything is fetched.
    VllmServer(server, settings.state_directory / "vllm.log").check_port()
    store = await asyncio.to_thread(Store.open, settings.store)
    engine_format: EngineFormat = "fp8" if multiplies_fp8 else "bf16"
    if settings.engine_format != "auto":
        engine_format = settings.engine_format
    engine = ServedVllm(
        server, settings.state_directory, kv_policy=settings.kv_policy, engine_format=engine_format
    )
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


async def wait_for_first_version(store: Store, *, timeout: float) -> None:
    """Returns once the chain has a version. `ServeError` naming store and key after `timeout` seconds."""
    began = time.monotonic()
    while True:
        latest = await asyncio.to_thread(read_latest, store)
        if latest is not None and latest.manifest is not None:
            return
        if time.monotonic() - began > timeout:
            raise ServeError(
                f"{store.url}: no policy version after {timeout:.0f} s ({LATEST_KEY} names none). Start the "
                "trainer of this run, see that both use the same store, or wait longer"
            )
        await asyncio.sleep(min(POLL_SECONDS, timeout))


def server_settings(settings: ServeSettings, *, on_gpu: bool) -> VllmServerSettings:
    """What the server is started with."""
    kv_cache_gib = settings.kv_cache_gib
    if kv_cache_gib is None and not on_gpu:
        kv_cache_gib = CPU_KV_CACHE_GIB
    return VllmServerSettings(
        host=settings.host,
        port=settings.port,
        startup_timeout=settings.startup_timeout,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        dtype=settings.dtype,
        kv_cache_gib=kv_cache_gib,
        enforce_eager=not on_gpu,
        chunked_prefill=on_gpu,
        return_routed_experts=settings.moe_routing,
        cpu_threads=settings.cpu_threads,
        extra_args=settings.extra_args,
        environment=settings.environment,
    )


def _accelerator() -> tuple[bool, bool]:
    """(has a GPU that torch can use, it multiplies FP8)."""
    import torch

    if not torch.cuda.is_available():
        return False, False
    return True, torch.cuda.get_device_capability() >= (8, 9)
