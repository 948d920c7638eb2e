"""Train a plain Flax Linen model on eight devices with sharded weights (FSDP) and tensor parallelism.

    pip install -e .
    python docs/examples/sharding_linen.py

Without accelerators it simulates eight devices on the CPU. The model knows nothing of meshes: it names the
axes of its weights, and the rules below say where each name goes.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from sharding import (
    MeshSpec,
    ShardingRules,
    collectives,
    describe,
    logical_axes_of,
    report,
    shard,
    shardings_like,
)

RULES = ShardingRules({"embed": "fsdp", "mlp": "tensor", "classes": None})


class Classifier(nn.Module):
    """[batch, features] -> [batch, 4] logits."""

    @nn.compact
    def __call__(self, x):
        def dense(width: int, *axes: str) -> nn.Dense:
            initializer = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(width, use_bias=False, kernel_init=initializer)

        x = nn.relu(dense(64, "embed", "mlp")(x))
        x = nn.relu(dense(16, "mlp", "embed")(x))
        return dense(4, "embed", "classes")(x)


def main(spec: MeshSpec, *, steps: int = 30, devices: list | None = None) -> list[float]:
    """Train on labels that a fixed linear map makes; the loss of each step."""
    mesh = spec.build(devices)
    model, optimizer = Classifier(), optax.adam(1e-2)
    key = jax.random.key(0)
    x = jax.random.normal(key, (64, 16))
    labels = jnp.argmax(x @ jax.random.normal(jax.random.key(1), (16, 4)), axis=-1)

    # Shapes first, then shardings, then weights: each device makes only its own part of them.
    shapes = jax.eval_shape(model.init, key, x)
    param_shardings = RULES.shardings(logical_axes_of(shapes), shapes, mesh)
    state_shapes = jax.eval_shape(optimizer.init, shapes)
    state_shardings = shardings_like(state_shapes, shapes, param_shardings, mesh)
    params = jax.jit(model.init, out_shardings=param_shardings)(key, x)
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    x, labels = shard((x, labels), NamedSharding(mesh, PartitionSpec("fsdp")))

    def step(params, state, x, labels):
        def loss_fn(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), labels)
            return losses.mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    outputs = (param_shardings, state_shardings, None)
    compiled = jax.jit(step, out_shardings=outputs).lower(params, state, x, labels).compile()
    print(describe(params))
    print(report(collectives(compiled, mesh)))

    losses = []
    for _ in range(steps):
        params, state, loss = compiled(params, state, x, labels)
        losses.append(float(loss))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(MeshSpec({"fsdp": 2, "tensor": -1}))
