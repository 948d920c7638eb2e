"""From a published version to tokens made by it, on a real vLLM server that keeps generating.

    python benchmarks/smollm2.py /tmp/smollm2_hf
    python benchmarks/weight_sync.py [--models tiny_glm_moe smollm2 wide_glm_moe] [--rounds 3] > results.jsonl
    python benchmarks/weight_sync_model.py results.jsonl

For each model: a publisher, a store on this disk, a mirror and a vLLM server (no accelerator needed), with
`--requests` running requests. Every round the weights move by Gaussian noise of RMS `--update-rms` (what Muon
does at 5 times that learning rate), are published, fetched, staged and loaded, in turns with keep_kv and
recompute_kv; then the server reloads the same version by itself (`reload_weights`, from files in the page
cache). The server has half of the cores and this process the other half, as if it were another host's: vLLM's
threads spin. One JSON object a model and line:

    pause_ms_p50, pause_ms_p95   no token can be made, as the agent sees it, both KV policies
    load_and_pack_ms    of the pause, median: loading and packing decoded tensors, measured in the worker
    full_reload_ms      the pause of the engine's own reload, median
    stall_ms_p50        from the start of the pause until tokens come at 90% of the rate before, recompute_kv
    publish_to_served_ms   from `publish` to the server's `/resume`, median
    delta_bytes, full_bytes   of a version; BF16
    detail              stages of publish_to_served_ms, the calls that a pause is made of (/pause waits for
                        the step that runs), the other stalls, the targets as ratios of this run
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np

from rollout_bridge import architectures
from rollout_bridge.architectures.tensors import paths, stacked_shape
from rollout_bridge.engines.protocol import KvPolicy, Request, UpdateReport
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_protocol import generate_payload
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
from rollout_bridge.quantization.plan import plan_for
from rollout_bridge.store import Store
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.subscriber import Subscriber
from rollout_bridge.weights.write.publisher import Publisher, WriterSettings

TINY_GLM_MOE: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": True,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
# Many small tensors: what one costs, whatever its size.
WIDE_GLM_MOE = TINY_GLM_MOE | {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "n_routed_experts": 64,
    "num_attention_heads": 4,
}
PAUSE_CALLS = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume")
PROMPT_TOKENS, COMPLETION_TOKENS = 100, 200
BEFORE_SECONDS, AFTER_SECONDS, RATE_SECONDS = 1.5, 2.0, 0.4

Params = dict[str, jax.Array]


def load_model(name: str, smollm2: Path) -> tuple[RunInfo, Params]:
    """A run and its float32 parameters: random ones, or SmolLM2-135M's."""
    random_ones = {"tiny_glm_moe": TINY_GLM_MOE, "wide_glm_moe": WIDE_GLM_MOE}
    config = random_ones.get(name) or json.loads((smollm2 / "config.json").read_text())
    run = RunInfo.new(config, plan_for(architectures.tensors(config), serving=None))
    if name == "smollm2":
        from safetensors.torch import load_file

        file = load_file(smollm2 / "model.safetensors")
        tree = architectures.to_tree(config, lambda tensor: file[tensor].float().numpy())
        return run, {path: jnp.asarray(array) for path, array in tree.items()}
    random = np.random.default_rng(0)
    params = {}
    for path, group in paths(run.sources).items():
        shape = stacked_shape(group)
        values = random.standard_normal(shape, dtype=np.float32)
        params[path] = jnp.asarray(1 + 0.1 * values if "norm" in path else values * shape[-1] ** -0.5)
    return run, params


def generate_load(url: str, requests: int, vocabulary: int, record: Path) -> None:
    """A process of its own: requests that never stop. Writes down when tokens came, and how many."""

    async def ask(session: aiohttp.ClientSession, client: int, arrivals: TextIO) -> None:
        for turn in itertools.count():
            request = Request(
                request_id=f"{client}-{turn}",
                prompt_ids=[(client + 7 * turn + n) % vocabulary for n in range(PROMPT_TOKENS)],
                max_tokens=COMPLETION_TOKENS - 10 * (client % 8),
                temperature=1.0,
                seed=turn,
                stop_ids=(),
            )
            body = generate_payload(request, cache_salt=None) | {"stream": True}
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        made = json.loads(line[6:])["choices"][0].get("token_ids") or ()
                        arrivals.write(f"{time.monotonic()} {len(made)}\n")

    async def main() -> None:
        with record.open("w", buffering=1) as arrivals:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session:
                await asyncio.gather(*(ask(session, client, arrivals) for client in range(requests)))

    asyncio.run(main())


def stall_ms(record: Path, *, quiet: float, began: float) -> float:
    """From `began` until tokens come at 90% of the rate in the seconds up to `quiet` (both time.monotonic).

    The first window of `RATE_SECONDS` counts that has the rate; the whole record if none has.
    """
    lines = [line.split() for line in record.read_text().splitlines()[:-1]]
    arrivals = [(float(when), int(tokens)) for when, tokens in lines]

    def rate(start: float, stop: float) -> float:
        return sum(n for when, n in arrivals if start <= when < stop) / (stop - start)

    before = rate(quiet - BEFORE_SECONDS, quiet)
    last = arrivals[-1][0]
    for when, _ in arrivals:
        if began <= when <= last - RATE_SECONDS and rate(when, when + RATE_SECONDS) >= 0.9 * before:
            return 1e3 * (when - began)
    return 1e3 * (last - began)


@dataclass
class Chain:
    """Trainer's and fleet's ends of one run."""

    publisher: Publisher
    subscriber: Subscriber
    params: Params
    update_rms: float
    version: int = 0

    def step(self) -> None:
        self.version += 1
        keys = jax.random.split(jax.random.key(self.version, impl="unsafe_rbg"), len(self.params))
        self.params = {
            path: value + self.update_rms * jax.random.normal(key, value.shape, value.dtype)
            for key, (path, value) in zip(keys, self.params.items(), strict=True)
        }
        jax.block_until_ready(self.params)

    def publish(self) -> Any:
        return self.publisher.publish(self.params, step=self.version).result(300)


@dataclass
class Measured:
    """Milliseconds, one entry a round."""

    reports: list[UpdateReport] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    fetch: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    reload: list[float] = field(default_factory=list)
    stall: dict[str, list[float]] = field(default_factory=dict)
    delta_bytes: list[int] = field(default_factory=list)
    full_bytes: int = 0
    calls: dict[str, list[float]] = field(default_factory=dict)


def time_calls(engine: VllmEngine, calls: dict[str, list[float]]) -> None:
    """From now on `calls` gets what every exchange with the server takes, by path."""
    client: Any = engine
    call = client._call

    async def timed(method: str, path: str, *body: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return await call(method, path, *body, **options)
        finally:
            calls.setdefault(path.partition("?")[0], []).append(1e3 * (time.monotonic() - began))

    client._call = timed


async def update_round(engine: VllmEngine, chain: Chain, record: Path, measured: Measured) -> None:
    await asyncio.to_thread(chain.step)
    await asyncio.sleep(BEFORE_SECONDS)
    began = time.monotonic()
    manifest = await asyncio.to_thread(chain.publish)
    published = time.monotonic()
    update = await asyncio.to_thread(chain.subscriber.advance)
    fetched = time.monotonic()
    assert update is not None and update.verified == len(chain.publisher.run.tensors)
    report = await engine.update(update)
    ended = time.monotonic()
    await asyncio.sleep(AFTER_SECONDS)
    measured.reports.append(report)
    measured.publish.append(1e3 * (published - began))
    measured.fetch.append(1e3 * (fetched - published))
    measured.total.append(1e3 * (ended - began))
    stall = stall_ms(record, quiet=began, began=ended - report.pause_ms / 1e3)
    measured.stall.setdefault(engine.kv_policy.value, []).append(stall)
    measured.delta_bytes.append(manifest.stats.delta_bytes)
    measured.full_bytes = manifest.stats.full_bytes_bf16


async def reload_round(engine: VllmEngine, chain: Chain, record: Path, measured: Measured, to: Path) -> None:
    """The engine's own reload of what it serves: every tensor, from files just written."""
    directory = await asyncio.to_thread(chain.subscriber.mirror.materialize, to, "bf16")
    await asyncio.sleep(BEFORE_SECONDS)
    began = time.monotonic()
    await engine._call("POST", "/pause?mode=keep&clear_cache=true")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    await engine._call("POST", "/collective_rpc", body)
    await engine._call("POST", "/resume")
    measured.reload.append(1e3 * (time.monotonic() - began))
    await asyncio.sleep(AFTER_SECONDS)
    measured.stall.setdefault("full_reload", []).append(stall_ms(record, quiet=began, began=began))


async def measure(name: str, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    run, params = load_model(name, arguments.smollm2)
    store = Store.open(f"{directory}/store")
    runs.create_or_join(store, run)
    # As on a host of its own: here the load's processes are beside it.
    publisher = Publisher(store, run=run, full_every=1 << 20, settings=WriterSettings(niceness=0))
    publisher.take_over()
    mirror = Mirror(directory / "mirror")
    chain = Chain(publisher, Subscriber(store, mirror), params, arguments.update_rms)
    for _ in range(2):  # a full version and a delta: everything is compiled
        chain.step()
        chain.publish()
    chain.subscriber.advance()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = VllmServerSettings(
        port=port,
        kv_cache_gib=1.0,
        max_model_len=1024,
        startup_timeout=900.0,
        cpu_threads=",".join(map(str, arguments.server_cores)),
    )
    server = VllmServer(settings, directory / "vllm.log")
    began = time.perf_counter()
    await server.start(mirror.materialize(directory / "engine", "bf16"), chain.version)
    start_ms = 1e3 * (time.perf_counter() - began)
    print(f"{name}: the server is up after {start_ms / 1e3:.0f} s", file=sys.stderr)
    engine = VllmEngine(server.url)
    measured = Measured()
    time_calls(engine, measured.calls)
    record = directory / "arrivals"
    asked = (server.url, arguments.requests, run.hf_config["vocab_size"], record)
    load = multiprocessing.get_context("spawn").Process(target=generate_load, args=asked, daemon=True)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores) - set(arguments.server_cores) or cores)
    try:
        load.start()
        while not record.exists() or record.stat().st_size < 4096:
            await asyncio.sleep(0.1)
        for _ in range(arguments.rounds):
            for policy in KvPolicy:
                engine.kv_policy = policy
                await update_round(engine, chain, record, measured)
            await reload_round(engine, chain, record, measured, directory / "engine")
    finally:
        load.kill()
        await engine.close()
        os.sched_setaffinity(0, cores)
        await server.stop()
        publisher.close()
        mirror.close()
    return row(name, arguments, run, measured, start_ms)


def row(
    name: str, arguments: argparse.Namespace, run: RunInfo, measured: Measured, start_ms: float
) -> dict[str, Any]:
    pauses = [report.pause_ms for report in measured.reports]
    loads = [report.load_ms for report in measured.reports]
    staging = [report.total_ms - report.pause_ms for report in measured.reports]
    stalls = {policy: statistics.median(values) for policy, values in measured.stall.items()}
    reload_ms = statistics.median(measured.reload)
    tensors = measured.reports[-1].tensors
    experts = [source.name for source in run.sources if ".mlp.experts." in source.name]
    layers = {name.partition(".mlp.experts.")[0] for name in experts}  # loaded as two tensors each
    ratios = [pause / loading for pause, loading in zip(pauses, loads, strict=True)]
    return {
        "model": name,
        "pause_ms_p50": statistics.median(pauses),
        "pause_ms_p95": float(np.percentile(pauses, 95)),
        "load_and_pack_ms": statistics.median(loads),
        "full_reload_ms": reload_ms,
        "stall_ms_p50": stalls[KvPolicy.RECOMPUTE.value],
        "publish_to_served_ms": statistics.median(measured.total),
        "delta_bytes": int(statistics.median(measured.delta_bytes)),
        "full_bytes": measured.full_bytes,
        "detail": {
            "parameters": sum(int(np.prod(source.shape)) for source in run.sources),
            "updates": len(pauses),
            "stages_ms": {
                "publish": statistics.median(measured.publish),
                "fetch_verify_apply": statistics.median(measured.fetch),
                "stage": statistics.median(staging),
                "pause": statistics.median(pauses),
            },
            "calls_ms": {path: statistics.median(measured.calls[path]) for path in PAUSE_CALLS},
            "stall_keep_kv_ms_p50": stalls[KvPolicy.KEEP.value],
            "stall_full_reload_ms_p50": stalls["full_reload"],
            "start_ms": start_ms,
            "pause_over_load_and_pack": statistics.median(ratios),
            "pause_over_full_reload": statistics.median(pauses) / reload_ms,
            "canonical_bytes": sum(spec.nbytes for spec in run.tensors.values()),
            "tensors": tensors,
            "loader_tensors": tensors - len(experts) + 2 * len(layers),
            "server_cores": len(arguments.server_cores),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load_average": os.getloadavg()[0],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["tiny_glm_moe", "smollm2", "wide_glm_moe"]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--smollm2", type=Path, default=Path("/tmp/smollm2_hf"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--update-rms", type=float, default=1e-5)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    arguments.server_cores = cores[: max(1, len(cores) // 2)]
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(asyncio.run(measure(name, arguments, Path(directory)))), flush=True)


if __name__ == "__main__":
    main()
