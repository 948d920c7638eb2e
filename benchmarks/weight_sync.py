"""What an update of weights costs a vLLM server that is generating: the pause, against starting it anew.

    python benchmarks/weight_sync.py [--hidden 512 --layers 4 --experts 16 --requests 8 --updates 5]

Starts one server on this machine (it needs vLLM and no accelerator) with a random Glm4Moe, keeps requests
running, and moves it through versions in which every tensor changes, once with each KV policy. Prints JSON:
`pause_ms`, when no token is made; `stage_ms`, mapping and dequantising while tokens are made; `restart_ms`,
what a start from files takes; `pause_over_restart`, the ratio in this run. Best and median of the updates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollout_bridge import names
from rollout_bridge.engines.protocol import KvPolicy, Request
from rollout_bridge.engines.vllm import VllmEngine
from rollout_bridge.engines.vllm_server import VllmServer, VllmServerSettings
from rollout_bridge.quantization.digest import digest
from rollout_bridge.quantization.host import float32_to_bfloat16_bits, quantize_block_fp8
from rollout_bridge.quantization.plan import Format, plan_for, scale_name
from rollout_bridge.weights.manifest import ManifestRef
from rollout_bridge.weights.mirror import Mirror
from rollout_bridge.weights.mirror_view import MirrorState
from rollout_bridge.weights.run import RunInfo
from rollout_bridge.weights.update import Update


def model(arguments: argparse.Namespace) -> RunInfo:
    config = {
        "model_type": "glm4_moe",
        "vocab_size": 4096,
        "hidden_size": arguments.hidden,
        "intermediate_size": 4 * arguments.hidden,
        "moe_intermediate_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "first_k_dense_replace": 1,
        "n_routed_experts": arguments.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_attention_heads": arguments.hidden // 64,
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
    shapes = {source.name: source.shape for source in names.tensors(config)}
    return RunInfo.new(config, plan_for(shapes, architecture="glm4_moe", serving=None))


def set_version(mirror: Mirror, run: RunInfo, version: int) -> Update:
    """Move the mirror to random weights; all tensors change."""
    random = np.random.default_rng(version)
    bits: dict[str, np.ndarray] = {}
    for source in run.sources:
        values = random.standard_normal(source.shape, dtype=np.float32) * source.shape[-1] ** -0.5
        form = run.plan.formats[source.name]
        if form is Format.f32:
            bits[source.name] = values.view(np.uint32)
        elif form is Format.bf16:
            bits[source.name] = float32_to_bfloat16_bits(values)
        else:
            codes, scales = quantize_block_fp8(float32_to_bfloat16_bits(values))
            bits[source.name], bits[scale_name(source.name)] = codes, scales.view(np.uint32)

    def fill(tensor: Callable[[str], np.ndarray]) -> None:
        for name, value in bits.items():
            tensor(name)[...] = value

    ref = ManifestRef(version=version, incarnation=1, hash=f"{version:064x}")
    state = MirrorState(ref, step=version, digests={name: digest(value) for name, value in bits.items()})
    mirror.bind(run)
    mirror.replace(run, state, fill)
    return Update(
        version=version,
        incarnation=1,
        step=version,
        changed=frozenset(bits),
        tensor=mirror.tensor,
        mirror=mirror.directory,
        verified=len(bits),
    )


async def updates(
    arguments: argparse.Namespace, server: VllmServer, mirror: Mirror, run: RunInfo, policy: KvPolicy
) -> dict[str, Any]:
    engine = VllmEngine(server.url, kv_policy=policy)
    stop = asyncio.Event()

    async def client(number: int) -> int:
        tokens = 0
        while not stop.is_set():
            request = Request(
                request_id=f"{number}",
                prompt_ids=range(100),
                max_tokens=300,
                temperature=1.0,
                seed=number,
                stop_ids=(),
            )
            tokens += sum(len(completion.token_ids) for completion in await engine.generate([request]))
        return tokens

    clients = [asyncio.create_task(client(number)) for number in range(arguments.requests)]
    reports = []
    for _ in range(arguments.updates):
        await asyncio.sleep(2)
        version = (mirror.version or 0) + 1
        reports.append(await engine.update(await asyncio.to_thread(set_version, mirror, run, version)))
    stop.set()
    tokens = sum(await asyncio.gather(*clients))
    await engine.close()
    pauses = [report.pause_ms for report in reports]
    staging = [report.total_ms - report.pause_ms for report in reports]
    return {
        "pause_ms": {"best": min(pauses), "median": statistics.median(pauses)},
        "stage_ms": {"best": min(staging), "median": statistics.median(staging)},
        "tensors": reports[-1].tensors,
        "tokens": tokens,
    }


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    run = model(arguments)
    mirror = Mirror(directory / "mirror")
    set_version(mirror, run, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = VllmServer(VllmServerSettings(port=port, kv_cache_gib=0.5), directory / "vllm.log")
    loaded = mirror.materialize(directory / "engine", "bf16")
    began = time.perf_counter()
    await server.start(loaded, 1)
    restart_ms = (time.perf_counter() - began) * 1e3
    try:
        policies = {p.value: await updates(arguments, server, mirror, run, p) for p in KvPolicy}
    finally:
        await server.stop()
        mirror.close()
    return {
        "parameters": sum(int(np.prod(source.shape)) for source in run.sources),
        "canonical_bytes": sum(spec.nbytes for spec in run.tensors.values()),
        "restart_ms": restart_ms,
        "policies": policies,
        "pause_over_restart": {p: found["pause_ms"]["best"] / restart_ms for p, found in policies.items()},
        "machine": platform.processor() or platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--updates", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(measure(arguments, Path(directory))), indent=1))


if __name__ == "__main__":
    main()
