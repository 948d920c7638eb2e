"""How much publishing every step slows a training step down.

    python benchmarks/publish_overlap.py [--tokens 8192 --hidden 512 --layers 4 --experts 8 --rounds 6]

A step does the matrix products of a training step of `--tokens` tokens on a Glm4Moe (6 FLOPs a token and
parameter, all experts dense) on this process's devices, and an update of RMS `--update-rms`. Rounds of
`--steps` steps take turns: one without publication, one that publishes every step to a store on disk, both in
one process. On a CPU the encoder takes its cores from the training step; on an accelerator only the
quantisation and the comparison run beside it. Prints one JSON object:

    step_seconds      medians of a step, {plain, publishing}; slowdown: their ratio less 1
    processor_seconds the same of processor time of all threads, and its ratio, for a machine that is not idle
    publish_call_ms   what `publish` itself holds the trainer up, median
    publish_seconds   in the background, to the moved head, median; overtaken: how many a newer one replaced
    delta_bytes, full_bytes_bf16, cores, tokens, parameters
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_bridge import names
from rollout_bridge.names.base import paths, stacked_shape
from rollout_bridge.quantization.plan import plan_for
from rollout_bridge.store import Store
from rollout_bridge.weights import run as runs
from rollout_bridge.weights.publisher import Publisher
from rollout_bridge.weights.run import RunInfo

Params = dict[str, jax.Array]


def new_run(arguments: argparse.Namespace) -> RunInfo:
    config = {
        "model_type": "glm4_moe",
        "vocab_size": 4096,
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "first_k_dense_replace": 1,
        "intermediate_size": 4 * arguments.hidden,
        "moe_intermediate_size": arguments.hidden,
        "n_routed_experts": arguments.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": True,
        "use_qk_norm": True,
    }
    shapes = {source.name: source.shape for source in names.tensors(config)}
    return RunInfo.new(config, plan_for(shapes, architecture="glm4_moe", serving=None))


def training_step(tokens: int, update_rms: float) -> Any:
    """Jitted (params, key) -> params: forward, both backward products of every matrix, and an update."""

    def step(params: Params, key: jax.Array) -> Params:
        updated = {}
        widest = max(weight.shape[-2] for weight in params.values() if weight.ndim >= 3)
        inputs = jax.random.normal(key, (tokens, widest), jnp.float32)
        for path, weight in params.items():
            noise = jax.random.normal(jax.random.fold_in(key, len(updated)), weight.shape, weight.dtype)
            gradient = noise
            if weight.ndim >= 3:
                matrices = weight.reshape(-1, *weight.shape[-2:])

                def products(matrix: jax.Array) -> jax.Array:
                    x = inputs[:, : matrix.shape[0]]
                    y = x @ matrix
                    return x.T @ (y + 1e-6 * (y @ matrix.T).sum())

                gradient = noise + 1e-9 * jax.lax.map(products, matrices).reshape(weight.shape)
            updated[path] = weight + update_rms * gradient
        return updated

    return jax.jit(step, donate_argnums=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 8192), ("hidden", 512), ("layers", 4), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--update-rms", type=float, default=1e-6)
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    run = new_run(arguments)
    params: Params = {
        path: jnp.asarray(0.02 * random.standard_normal(stacked_shape(group), dtype=np.float32))
        for path, group in paths(run.sources).items()
    }
    step = training_step(arguments.tokens, arguments.update_rms)
    number = 0
    wall: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    calls, publications = [], []
    with tempfile.TemporaryDirectory() as directory:
        store = Store.open(f"{directory}/store")
        runs.create_or_join(store, run)
        publisher = Publisher(store, run=run, full_every=1 << 20)
        publisher.take_over()
        params = jax.block_until_ready(step(params, jax.random.key(0, impl="unsafe_rbg")))
        for warm in range(2):  # full, then the first change: everything is compiled
            publisher.publish(params, step=warm).result()
            params = jax.block_until_ready(step(params, jax.random.key(warm, impl="unsafe_rbg")))
        for turn in range(2 * arguments.rounds):
            publishing = turn % 2 == 1
            publication = None
            for _ in range(arguments.steps):
                number += 1
                began, worked = time.perf_counter(), time.process_time()
                params = jax.block_until_ready(step(params, jax.random.key(number, impl="unsafe_rbg")))
                if publishing:
                    called = time.perf_counter()
                    publication = publisher.publish(params, step=number + 2)
                    calls.append(1e3 * (time.perf_counter() - called))
                wall[publishing].append(time.perf_counter() - began)
                processor[publishing].append(time.process_time() - worked)
            if publication is not None:  # the last one ends after its step: its work counts all the same
                began = time.process_time()
                publication.result()
                processor[True][-1] += time.process_time() - began
                publications.append(publisher.counters["publish_milliseconds"] / 1e3)
        assert publisher.last is not None
        stats, counters = publisher.last.stats, dict(publisher.counters)
        publisher.close()
    seconds = {name: statistics.median(wall[key]) for name, key in (("plain", False), ("publishing", True))}
    worked_mean = {
        name: statistics.fmean(processor[key]) for name, key in (("plain", False), ("publishing", True))
    }
    print(
        json.dumps(
            {
                "benchmark": "publish_overlap",
                "step_seconds": seconds,
                "slowdown": seconds["publishing"] / seconds["plain"] - 1,
                "processor_seconds": worked_mean,
                "processor_slowdown": worked_mean["publishing"] / worked_mean["plain"] - 1,
                "publish_call_ms": statistics.median(calls),
                "publish_seconds": statistics.median(publications),
                "overtaken": counters.get("overtaken", 0),
                "delta_bytes": stats.delta_bytes,
                "full_bytes_bf16": stats.full_bytes_bf16,
                "changed_fraction": stats.changed_fraction,
                "tokens": arguments.tokens,
                "parameters": stats.full_bytes_bf16 // 2,
                "cores": os.cpu_count(),
                "load": os.getloadavg()[0],
                "machine": f"{platform.machine()} {jax.devices()[0].device_kind}",
                "jax": jax.__version__,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
