"""jaxtrain's own training programs on the benchmark's shape, AdamW for all parameters.

After each turn it also times one large float32 matrix product, so that both see the same machine.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from turns import Turns

from jaxtrain.data.batch import Batch
from jaxtrain.losses.next_token import NextToken
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.flops import training_flops
from jaxtrain.optim.optimizer import Method, OptimizerConfig
from jaxtrain.training.build import trainable
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.programs import train_step
from sharding.mesh import MeshSpec

SHAPE = json.loads(sys.argv[1])
MATMUL = 2048  # rows and columns of the matrix product that the machine's rate is measured with


def batch() -> Batch:
    """One microbatch of whole rows of random tokens."""
    shape = (1, SHAPE["rows"], SHAPE["sequence"])
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (*shape[:2], shape[2] + 1), np.int32)
    return Batch(
        {
            "tokens": tokens[..., :-1],
            "targets": tokens[..., 1:],
            "loss_weights": np.ones(shape, np.float32),
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape).copy(),
        }
    )


def main() -> None:
    turns = Turns()
    built = trainable(
        ModelConfig.from_hf(SHAPE, compute_dtype="float32"),
        MeshSpec(ici={"data": 1}).build(jax.devices()[:1]),
        OptimizerConfig(matrices=Method.adamw, lm_head=Method.adamw),
        clip_norm=1.0,
    )
    programs = built.programs(NextToken(), rows=SHAPE["rows"], sequence_length=SHAPE["sequence"])
    values = ScheduledValues(learning_rate=3e-5, router_bias_rate=1e-3, balance_weight=0.0, mtp_weight=0.0)
    state = built.initial_state(seed=0)
    data, compiled, violation = batch(), 0, 0.0

    def step() -> None:
        nonlocal state, compiled, violation
        state, report = train_step(programs, built.placement, state, data, values)
        compiled, violation = compiled + report.compilations, report.values["load_violation"]

    square = jnp.ones((MATMUL, MATMUL), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()

    def facts() -> dict[str, float]:
        times, processor = [], []
        for _ in range(3):
            started, used = time.perf_counter(), time.process_time()
            product(square, square).block_until_ready()
            times.append(time.perf_counter() - started)
            processor.append(time.process_time() - used)
        return {
            "matmul_flops_per_s": 2 * MATMUL**3 / min(times),
            "matmul_flops_per_processor_s": 2 * MATMUL**3 / min(processor),
            "recompilations": compiled,
            "load_violation": violation,
        }

    started = time.perf_counter()
    step()
    compile_s, compiled = time.perf_counter() - started, 0
    turns.ready(
        compile_s=compile_s,
        version=jax.__version__,
        parameters=sum(value.size for value in state.params.values()),
        flops_per_token=training_flops(built.definition).at_length(SHAPE["sequence"]),
    )
    turns.serve(step, facts)


if __name__ == "__main__":
    main()
