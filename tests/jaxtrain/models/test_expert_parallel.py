"""Experts on a mesh against the same experts on one device, however the tokens choose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.models import expert_parallel
from jaxtrain.models.config import ExpertImplementation
from jaxtrain.models.expert_parallel import Exchange, parallel_experts
from jaxtrain.models.experts import routed_experts
from jaxtrain.models.placement import activation_spec
from sharding.collectives import collectives
from sharding.mesh import MeshSpec

B, S, D, E, F, K = 8, 6, 8, 8, 12, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, S, D)).astype(np.float32)
COTANGENT = RNG.normal(size=(B, S, D)).astype(np.float32)
WEIGHTS = RNG.random((B, S, K)).astype(np.float32)
KERNELS = tuple(RNG.normal(size=shape).astype(np.float32) for shape in ((E, D, F), (E, D, F), (E, F, D)))
CHOICES = {
    "spread": np.argsort(RNG.random((B, S, E)), axis=-1)[..., :K],
    "two experts of two devices": np.broadcast_to([3, 5], (B, S, K)),
    "two experts of one device": np.broadcast_to([2, 3], (B, S, K)),
}


def reference(x, weights, gate, up, down, ids):
    out = routed_experts(
        x.reshape(-1, D), ids.reshape(-1, K), weights.reshape(-1, K), (gate, up, down),
        implementation=ExpertImplementation.DENSE,
    )  # fmt: skip
    return (out.reshape(x.shape) * COTANGENT).sum(), out.reshape(x.shape)


@pytest.mark.parametrize("buffer", [1.0, 100.0], ids=["in rounds", "at once"])
def test_values_and_gradients_equal_those_of_one_device(buffer):
    """A buffer of the balanced load needs up to 4 rounds here; a buffer for the worst case needs one."""
    mesh = MeshSpec(ici={"expert": 4, "tensor": 2}).build()

    def on_mesh(x, weights, gate, up, down, ids):
        out = parallel_experts(
            x, ids, weights, (gate, up, down), mesh=mesh, implementation=ExpertImplementation.BLOCKS,
            buffer=buffer,
        )  # fmt: skip
        return (out * COTANGENT).sum(), out

    tokens = NamedSharding(mesh, activation_spec(mesh))
    into, out_of = PartitionSpec("expert", None, "tensor"), PartitionSpec("expert", "tensor")
    kernels = [
        jax.device_put(kernel, NamedSharding(mesh, spec))
        for kernel, spec in zip(KERNELS, (into, into, out_of), strict=True)
    ]
    every = tuple(range(5))
    args = (*(jax.device_put(a, tokens) for a in (X, WEIGHTS)), *kernels)
    ids = {name: np.ascontiguousarray(a).astype(np.int32) for name, a in CHOICES.items()}
    placed = {name: jax.device_put(a, tokens) for name, a in ids.items()}
    step = jax.jit(jax.value_and_grad(on_mesh, argnums=every, has_aux=True))
    compiled = step.lower(*args, placed["spread"]).compile()
    wanted = jax.jit(jax.value_and_grad(reference, argnums=every, has_aux=True))
    for name in CHOICES:
        (_, out), gradients = compiled(*args, placed[name])
        (_, wanted_out), wanted_gradients = wanted(X, WEIGHTS, *KERNELS, ids[name])
        for found, expected in zip((out, *gradients), (wanted_out, *wanted_gradients), strict=True):
            error = np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()
            assert error <= 1e-5, name
    over_experts = {one.kind for one in collectives(compiled, mesh) if "expert" in one.axes}
    assert "all-to-all" in over_experts
    assert over_experts <= {"all-to-all", "all-reduce"}  # the reduced: loss, and the number of rounds
    assert all(g.sharding.spec[0] == "expert" for g in gradients[2:])


def test_experts_that_the_axis_does_not_divide_are_refused():
    mesh = MeshSpec(ici={"expert": 8}).build()
    kernels = tuple(jnp.asarray(kernel[:6]) for kernel in KERNELS)
    with pytest.raises(ValueError, match="6 experts are not divisible by the 8 devices"):
        parallel_experts(
            X, CHOICES["spread"], WEIGHTS, kernels, mesh=mesh, implementation=ExpertImplementation.DENSE
        )


@pytest.mark.parametrize(("platform", "grouped"), [("cpu", False), ("gpu", False), ("tpu", True)])
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 2, "expert": 4}], ids=["whole", "split"])
def test_auto_goes_by_the_devices_of_the_mesh(axes, platform, grouped, monkeypatch):
    """Which a program for an absent TPU has, too, whatever the default platform is."""
    monkeypatch.setattr(expert_parallel, "platform", lambda mesh: platform)
    mesh = MeshSpec(ici=axes).build()

    def run(x, weights, ids, *kernels):
        return parallel_experts(
            x, ids, weights, kernels, mesh=mesh, implementation=ExpertImplementation.AUTO,
            exchange=Exchange.PADDED,
        )  # fmt: skip

    program = str(jax.make_jaxpr(run)(X, WEIGHTS, CHOICES["spread"].astype(np.int32), *KERNELS))
    assert ("ragged_dot" in program) == grouped
