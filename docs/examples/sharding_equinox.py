"""Train an Equinox model on eight devices with sharded weights (FSDP) and tensor parallelism.

    pip install -e . equinox
    python docs/examples/sharding_equinox.py

An Equinox model is a tree of arrays and functions. Its arrays are placed by the names of their leaves; the
model and its training step are what they would be on one device.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from sharding import (
    MeshSpec,
    ShardingRules,
    assert_sharded,
    collectives,
    describe,
    report,
    shard,
    shardings_like,
)

RULES = ShardingRules({"embed": "fsdp", "mlp": "tensor"})
# Equinox stores [out, in]; layers/0 is the first. A name that is missing here is an error.
AXES = {
    "layers": {
        "0": {"weight": ("mlp", "embed"), "bias": ("mlp",)},
        "1": {"weight": ("embed", "mlp"), "bias": ("embed",)},
        "2": {"weight": (None, "embed"), "bias": None},
    }
}


def main(spec: MeshSpec, *, steps: int = 30, devices: list | None = None) -> list[float]:
    """Train on labels that a fixed linear map makes; the loss of each step."""
    mesh = spec.build(devices)
    key = jax.random.key(0)
    x = jax.random.normal(key, (64, 16))
    labels = jnp.argmax(x @ jax.random.normal(jax.random.key(1), (16, 4)), axis=-1)
    keys = jax.random.split(key, 3)
    sizes = ((16, 64), (64, 16), (16, 4))
    model = Layers([eqx.nn.Linear(a, b, key=k) for (a, b), k in zip(sizes, keys, strict=True)])

    params, static = eqx.partition(model, eqx.is_array)
    shardings = RULES.shardings(AXES, params, mesh)
    params = shard(params, shardings)
    optimizer = optax.adam(1e-2)
    state_shardings = shardings_like(jax.eval_shape(optimizer.init, params), params, shardings, mesh)
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    x, labels = shard((x, labels), NamedSharding(mesh, PartitionSpec("fsdp")))

    def step(params, state, x, labels):
        def loss_fn(params):
            logits = jax.vmap(eqx.combine(params, static))(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    outputs = (shardings, state_shardings, None)
    compiled = jax.jit(step, out_shardings=outputs).lower(params, state, x, labels).compile()
    print(describe(params))
    print(report(collectives(compiled, mesh)))

    losses = []
    for _ in range(steps):
        params, state, loss = compiled(params, state, x, labels)
        losses.append(float(loss))
    assert_sharded(params, shardings)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


class Layers(eqx.Module):
    """[features] -> logits; one example, as Equinox models are, so that `vmap` makes the batch."""

    layers: list[eqx.nn.Linear]

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)


if __name__ == "__main__":
    main(MeshSpec({"fsdp": 2, "tensor": -1}))
