"""Builds what a rollout host runs from a config: a worker with its engine and sync agent, or a server.

The fleet reads the model from `run.json` in the store, not from the trainer's config, so it serves what is
published.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.environments import contract_of, environment_spec
from rollout_bridge import architectures
from rollout_bridge.agent import AgentSettings, SyncAgent, agent_name
from rollout_bridge.engines.protocol import KvPolicy, RolloutEngine, UpdateMode
from rollout_bridge.engines.vllm_server import VllmServerSettings
from rollout_bridge.errors import ExpectedError
from rollout_bridge.rollouts.environments.base import Environment
from rollout_bridge.rollouts.scoring import ScoringPool
from rollout_bridge.rollouts.settings import WorkerSettings
from rollout_bridge.rollouts.transcript import Limits
from rollout_bridge.rollouts.worker import RolloutWorker
from rollout_bridge.serve import ServeSettings
from rollout_bridge.store import Store
from rollout_bridge.waiting import looks
from rollout_bridge.weights.format.run import RUN_KEY, RunInfo
from rollout_bridge.weights.format.run import load as load_run

logger = logging.getLogger(__name__)

RUN_TIMEOUT_S = 600.0  # a trainer writes run.json before its first step; this is for slow machines
POLL_S = 0.25  # of the store; short beside a step, and a few reads a second are cheap


class FleetError(ExpectedError):
    """Something a rollout host needs did not appear; the message names it, where, and what to do."""


async def run_worker(config: AsyncGrpoConfig, environment: Environment, worker_id: str) -> None:
    """Runs a worker until the trainer has finished, or SIGTERM or SIGINT.

    Raises `FleetError` (no run in the store), `WorkerError`, `AgentError`, `EngineError`, `StoreError`.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    store = await asyncio.to_thread(Store.open, config.store_url)
    run = await wait_for_run(store, timeout_s=RUN_TIMEOUT_S, stop=stop)
    if run is None:
        return
    own = config.run_dir / "workers" / worker_id
    tokenizer = await asyncio.to_thread(load_tokenizer, run, own / "tokenizer")
    engine = build_engine(config, run)
    settings = worker_settings(config, stop_ids=stop_ids(run.hf_config, tokenizer.eos_token_id))
    embedded = config.rollouts.engine == "embedded"
    agent_id = agent_name(own, worker_id) if embedded else serving_agent(config)
    worker = RolloutWorker(
        store,
        engine,
        environment,
        tokenizer,
        scoring_pool(config),
        settings,
        worker_id,
        agent=agent_id,
        contract=contract_of(config, environment, run.hf_config),
    )
    try:
        if embedded:
            # The embedded engine's agent runs here; a server's runs in `jaxtrain serve`.
            agent = SyncAgent(store, own / "mirror", engine, agent_id, settings=AgentSettings(poll=POLL_S))
            await beside(worker.run(stop), agent.run())
        else:
            await worker.run(stop)
    finally:
        await engine.close()


async def beside(work: Coroutine[Any, Any, Any], service: Coroutine[Any, Any, Any]) -> None:
    """Runs `work` and `service` together. An error of either ends both; the end of `work` ends both."""
    working, serving = asyncio.create_task(work), asyncio.create_task(service)
    try:
        await asyncio.wait({working, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not working.done():
            serving.result()  # raises its error; without one the run is finished, and `work` ends too
        await working
    finally:
        for task in (working, serving):
            task.cancel()
        await asyncio.gather(working, serving, return_exceptions=True)


async def wait_for_run(store: Store, *, timeout_s: float, stop: asyncio.Event) -> RunInfo | None:
    """The run of a store once its trainer has created it; None if `stop` is set before.

    Raises `FleetError` naming store and key after `timeout_s`.
    """
    for pause in looks(timeout_s, POLL_S):
        if stop.is_set():
            return None
        run = await asyncio.to_thread(load_run, store)
        if run is not None:
            return run
        await asyncio.sleep(pause)
    raise FleetError(
        f"waited {timeout_s:g} s for {RUN_KEY} in {store.url}. Start the trainer of this run (jaxtrain "
        "train), and see that both use the same store"
    )


def load_tokenizer(run: RunInfo, directory: Path) -> Any:
    """The run's tokenizer, its files written to `directory`: the same on both sides."""
    from transformers import AutoTokenizer

    directory.mkdir(parents=True, exist_ok=True)
    for name, text in run.tokenizer.items():
        (directory / name).write_text(text, encoding="utf-8")
    return AutoTokenizer.from_pretrained(directory)


def build_engine(config: AsyncGrpoConfig, run: RunInfo) -> RolloutEngine:
    """The configured engine: in this process, or a client of this host's server."""
    section, kv_policy = config.rollouts, KvPolicy(config.rollouts.kv_policy)
    if section.engine == "vllm":
        from rollout_bridge.engines.vllm import VllmEngine
        from rollout_bridge.engines.vllm_pool import VllmPool

        ports = range(section.server_port, section.server_port + section.servers)
        moe_layers = moe_layers_of(run.hf_config) if section.capture_routed_experts else None
        engines = [
            VllmEngine(
                f"http://127.0.0.1:{port}",
                kv_policy=kv_policy,
                moe_layers=moe_layers,
                request_timeout=section.generate_timeout_s,
                update_timeout=section.update_timeout_s,
                version_timeout=section.engine_timeout_s,
            )
            for port in ports
        ]
        return engines[0] if len(engines) == 1 else VllmPool(engines)
    from jaxtrain.inference.engine import EmbeddedEngine, EngineSettings

    length = config.batch.sequence_length
    return EmbeddedEngine(
        run.hf_config,
        run.plan,
        EngineSettings(
            slots=section.slots,
            max_prompt=length - 1,  # a later turn's prompt is the episode so far
            max_length=length,
            kv_policy=kv_policy,
            capture_routed_experts=section.capture_routed_experts,
        ),
        compute_dtype=config.model.compute_dtype,
        expert_implementation=config.model.expert_implementation,
    )


def moe_layers_of(hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Indices of the layers with routed experts, MTP layers left out."""
    model = architectures.read(hf_config)
    return tuple(range(model.num_hidden_layers - model.num_moe_layers, model.num_hidden_layers))


def stop_ids(hf_config: dict[str, Any], tokenizer_eos: int | None) -> tuple[int, ...]:
    """Tokens that end an answer: those of config.json, which may be several, and the tokenizer's."""
    given = hf_config.get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    return tuple(sorted({int(value) for value in (*ids, tokenizer_eos) if value is not None}))


def worker_settings(config: AsyncGrpoConfig, *, stop_ids: tuple[int, ...]) -> WorkerSettings:
    """Groups in flight fill the engine's slots; prompts are claimed a segment at a time."""
    section = config.rollouts
    return WorkerSettings(
        run_seed=config.seed,
        group_size=section.group_size,
        limits=Limits(
            tokens=config.batch.sequence_length,
            answer_tokens=section.max_tokens,
            turns=section.max_turns,
            seconds=section.episode_timeout_s,
        ),
        temperature=section.temperature,
        task_tries=section.task_tries,
        max_concurrent_groups=-(-section.slots // section.group_size),
        claim_groups=section.segment_groups,
        lease_seconds=section.lease_seconds,
        segment_groups=section.segment_groups,
        flush_seconds=section.flush_seconds,
        generate_timeout_seconds=section.generate_timeout_s,
        abort_retries=section.abort_retries,
        engine_timeout_seconds=section.engine_timeout_s,
        idle_timeout_seconds=section.idle_timeout_s,
        poll_seconds=POLL_S,
        stop_ids=stop_ids,
    )


def scoring_pool(config: AsyncGrpoConfig) -> ScoringPool:
    """The processes of a worker that hold copies of the environment."""
    section = config.rollouts
    return ScoringPool(
        environment_spec(config),
        processes=section.scoring_processes,
        memory_bytes=section.scoring_memory_mb << 20,
        timeout_seconds=section.score_timeout_s,
    )


def server_directory(config: AsyncGrpoConfig) -> Path:
    """Of this host's servers and their agent."""
    return config.run_dir / "server-0"


def serving_agent(config: AsyncGrpoConfig) -> str:
    """The id of the agent of this host's servers."""
    return agent_name(server_directory(config), "server-0")


def serve_settings(config: AsyncGrpoConfig, *, agent_id: str) -> ServeSettings:
    """The vLLM servers of this host, on the cores this process may use."""
    section = config.rollouts
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return ServeSettings(
        store=config.store_url,
        state_directory=server_directory(config),
        agent_id=agent_id,
        server=VllmServerSettings(
            port=section.server_port,
            request_timeout=section.generate_timeout_s,
            update_timeout=section.update_timeout_s,
            tensor_parallel=config.weights.tensor_parallel,
            data_parallel=config.weights.data_parallel,
            expert_parallel=config.weights.experts_whole and config.model.n_routed_experts is not None,
            max_model_len=config.batch.sequence_length,
            max_num_seqs=section.slots,
            cpu_threads=",".join(map(str, cores)) or "auto",
            return_routed_experts=section.capture_routed_experts,
            extra_args=tuple(section.server_args),
        ),
        servers=section.servers,
        at_once=section.servers_at_once,
        kv_policy=KvPolicy(section.kv_policy),
        update_mode=UpdateMode(section.update_mode),
        agent=AgentSettings(poll=POLL_S),
    )
