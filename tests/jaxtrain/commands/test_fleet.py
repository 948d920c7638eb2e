"""What a rollout host is put together from, and how its parts end."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain.commands.fleet import (
    FleetError,
    beside,
    build_engine,
    serve_settings,
    stop_ids,
    wait_for_run,
    worker_settings,
)
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AsyncGrpoConfig
from rollout_bridge.engines.protocol import KvPolicy, UpdateMode
from rollout_bridge.engines.vllm_served import ServedVllm
from rollout_bridge.serve import ServeError, server_settings
from rollout_bridge.store import Store

ROOT = Path(__file__).parents[3]


def config(*overrides: str) -> AsyncGrpoConfig:
    loaded = load_config(ROOT / "configs/quickstart.yaml", overrides)
    assert isinstance(loaded, AsyncGrpoConfig)
    return loaded


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def failing() -> None:
    raise ValueError("broken")


async def returning() -> None:
    return


def test_the_end_of_the_work_ends_the_service() -> None:
    ended: list[str] = []
    asyncio.run(asyncio.wait_for(beside(returning(), forever(ended, "service")), 300))
    assert ended == ["service"]


def test_an_error_of_either_ends_both() -> None:
    ended: list[str] = []
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(asyncio.wait_for(beside(forever(ended, "work"), failing()), 300))
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(asyncio.wait_for(beside(failing(), forever(ended, "service")), 300))
    assert ended == ["work", "service"]


def test_a_store_without_a_run_is_named_with_the_remedy() -> None:
    store = Store.open("memory://no-run")
    with pytest.raises(FleetError, match=r"waited 0 s for run.json in memory://no-run/?. Start the trainer"):
        asyncio.run(wait_for_run(store, timeout_s=0.0, stop=asyncio.Event()))


def test_stopping_ends_the_wait_for_a_run() -> None:
    async def stopped() -> object:
        stop = asyncio.Event()
        stop.set()
        return await wait_for_run(Store.open("memory://no-run"), timeout_s=60.0, stop=stop)

    assert asyncio.run(stopped()) is None


def test_groups_in_flight_fill_the_slots() -> None:
    settings = worker_settings(config("rollouts.slots=20", "rollouts.group_size=8", "seed=3"), stop_ids=(2,))
    assert settings.max_concurrent_groups == 3  # 24 completions for 20 slots
    assert (settings.group_size, settings.run_seed) == (8, 3)


def test_a_worker_has_the_schemas_defaults() -> None:
    """Its settings have none of their own, so that no number is written twice."""
    section, settings = config().rollouts, worker_settings(config(), stop_ids=(2,))
    assert all(field.default is dataclasses.MISSING for field in dataclasses.fields(settings))
    assert settings.lease_seconds == section.lease_seconds == 60.0
    assert settings.flush_seconds == section.flush_seconds == 2.0
    assert settings.abort_retries == section.abort_retries == 3
    assert settings.limits.tokens == config().batch.sequence_length


def test_every_stop_token_of_the_model_ends_an_answer() -> None:
    """GLM-4.5's config.json lists three; a tokenizer has one."""
    ids = stop_ids({"eos_token_id": [151329, 151336, 151338]}, 151329)
    assert ids == (151329, 151336, 151338)
    assert worker_settings(config(), stop_ids=ids).stop_ids == ids
    assert stop_ids({"eos_token_id": 5}, 2) == (2, 5) and stop_ids({}, 2) == (2,)


def test_a_server_is_told_what_the_run_needs(tmp_path: Path) -> None:
    settings = serve_settings(
        config(
            f"runs_dir={tmp_path}",
            "name=x",
            "rollouts.server_port=8123",
            "rollouts.kv_policy=recompute_kv",
            "rollouts.server_args=[--seed=1]",
            "rollouts.update_mode=drain",
            "rollouts.servers=3",
            "rollouts.servers_at_once=2",
            "weights.tensor_parallel=2",
        ),
        agent_id="a",
    )
    assert settings.agent_id == "a"
    assert settings.store == f"file://{tmp_path}/x/store"
    assert settings.state_directory == tmp_path / "x/server-0"
    assert (settings.server.port, settings.kv_policy) == (8123, KvPolicy.RECOMPUTE)
    assert settings.server.extra_args == ("--seed=1",)
    assert (settings.update_mode, settings.servers, settings.at_once) == (UpdateMode.DRAIN, 3, 2)
    server = settings.server
    assert (server.tensor_parallel, server.data_parallel, server.expert_parallel) == (2, 1, True)
    assert not server.return_routed_experts
    capturing = serve_settings(config("rollouts.capture_routed_experts=true"), agent_id="a")
    assert capturing.server.return_routed_experts
    assert server.max_model_len == config().batch.sequence_length


def test_the_timeouts_of_a_servers_clients_are_those_of_the_config(tmp_path: Path) -> None:
    """Of the workers' client, and of the agent's."""
    given = config(
        f"runs_dir={tmp_path}",
        "rollouts.engine=vllm",
        "rollouts.generate_timeout_s=11",
        "rollouts.update_timeout_s=22",
        "rollouts.engine_timeout_s=33",
    )
    run: Any = SimpleNamespace(hf_config={})
    found: Any = build_engine(given, run)
    assert (found._request_timeout, found._update_timeout, found._version_timeout) == (11, 22, 33)
    settings = serve_settings(given, agent_id="a")
    served = ServedVllm(settings.server, tmp_path, kv_policy=settings.kv_policy, engine_format="bf16")
    client: Any = served._engine
    assert (client._request_timeout, client._update_timeout) == (11, 22)


def test_vllm_on_a_cpu_cannot_send_experts() -> None:
    """Its model runner that does so is written for GPUs."""
    settings = serve_settings(config("rollouts.capture_routed_experts=true"), agent_id="a")
    assert server_settings(settings, gpus=["0"]).return_routed_experts
    with pytest.raises(ServeError, match="capture_routed_experts.*embedded"):
        server_settings(settings, gpus=[])
