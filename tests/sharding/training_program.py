"""A plain jax model trained with weights and momentum over all devices.

`python training_program.py COORDINATOR ID` is one of two processes of four devices; it prints what it ended
with as one JSON line.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import processes
from sharding.inspect import assert_sharded
from sharding.mesh import MeshSpec
from sharding.rules import ShardingRules
from sharding.tree import gather, shard, to_global

STEPS, BATCH, EMBED, MLP = 3, 16, 16, 32
RULES = ShardingRules({"embed": "fsdp", "mlp": None})
AXES = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}


def data(step: int) -> np.ndarray:
    """The whole batch [BATCH, EMBED] of a step."""
    return np.random.default_rng(step).normal(size=(BATCH, EMBED)).astype(np.float32)


def train(mesh: Mesh) -> dict:
    """Three steps of momentum descent; losses and the final weights, whole."""
    rng = np.random.default_rng(99)
    params = {
        "up": rng.normal(size=(EMBED, MLP)).astype(np.float32) / 4,
        "down": rng.normal(size=(MLP, EMBED)).astype(np.float32) / 4,
    }
    shardings = RULES.shardings(AXES, params, mesh)
    rows = NamedSharding(mesh, P("fsdp"))
    params = shard(params, shardings)
    momentum = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p), out_shardings=shardings)(params)

    def step(params, momentum, x):
        def loss(params):
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - 0.5 * m, params, momentum), momentum, value

    jitted = jax.jit(step, out_shardings=(shardings, shardings, NamedSharding(mesh, P())))
    losses = []
    mine = slice(None)
    if processes.process_count() > 1:  # each process has read only its own rows
        share = BATCH // processes.process_count()
        mine = slice(processes.process_index() * share, (processes.process_index() + 1) * share)
    for index in range(STEPS):
        params, momentum, value = jitted(params, momentum, to_global(data(index)[mine], rows))
        losses.append(float(value))
    assert_sharded({"params": params, "momentum": momentum}, {"params": shardings, "momentum": shardings})
    return {"losses": losses, "params": {name: value.tolist() for name, value in gather(params).items()}}


def main(coordinator: str, process_id: int) -> None:
    processes.initialize(coordinator, 2, process_id, timeout_seconds=300)
    found = train(MeshSpec({"fsdp": -1}).build())
    processes.barrier("trained", 300)
    processes.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
