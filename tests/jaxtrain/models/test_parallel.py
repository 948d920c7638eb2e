"""A step on 8 devices is the step on one, whichever axes share the work, and communicates as planned."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.batch import Batch
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.objectives import next_token
from jaxtrain.models.definition import define
from jaxtrain.models.sharding_rules import parameter_shardings, row_sharding
from sharding.collectives import collectives
from sharding.mesh import MeshSpec
from tests.jaxtrain.models.forward import CONFIG, perturbed_parameters

MESHES = [
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 2, "expert": 4},
    {"fsdp": 2, "context": 4},
    {"expert": 2, "context": 2, "tensor": 2},
    {"data": 2, "expert": 4},
]
BALANCE = 0.1  # weight of the balance loss: enough for its gradient to count
ROWS, LENGTH = 8, 32


@cache
def parameters() -> dict[str, jax.Array]:
    return perturbed_parameters(seed=0)


@cache
def batch() -> Batch:
    """Documents of 3 to 20 tokens, some of them across the borders of a split sequence, and padding."""
    rng = np.random.default_rng(1)
    documents = [
        Document(
            tokens=rng.integers(0, CONFIG.vocab_size, n).astype(np.int32),
            loss_weights=rng.random(n).astype(np.float32),
        )
        for n in rng.integers(3, 21, 18)
    ]
    packed = pack(documents, rows=ROWS, sequence_length=LENGTH)
    return next(packed.microbatches())


def program(definition):
    """Loss with the balance loss, the experts' load, and gradients."""

    def objective(trained, buffers, batch):
        out = next_token(definition, {**trained, **buffers}, batch)
        return out.loss + BALANCE * out.router.balance.sum(), out.router.counts

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def arguments(params: dict[str, jax.Array]):
    buffers = define(CONFIG).buffers
    trained = {path: value for path, value in params.items() if path not in buffers}
    return trained, {path: params[path] for path in buffers}, batch()


@cache
def expected(one_expert: bool):
    return program(define(CONFIG))(*arguments(chosen_parameters(one_expert)))


def chosen_parameters(one_expert: bool) -> dict[str, jax.Array]:
    if not one_expert:
        return parameters()
    bias = jnp.zeros((CONFIG.num_moe_layers, CONFIG.n_routed_experts)).at[:, 3].set(100.0).at[:, 2].set(90.0)
    return {**parameters(), "moe/mlp/router/correction_bias": bias}


def on_mesh(axes: dict[str, int], params: dict[str, jax.Array], **changes: object):
    """The compiled program, its arguments in place, and the mesh."""
    mesh = MeshSpec(ici=axes).build()
    definition = define(dataclasses.replace(CONFIG, **changes)).on(mesh)
    shardings = parameter_shardings(definition, mesh)
    placed = {path: jax.device_put(value, shardings[path]) for path, value in params.items()}
    trained, buffers, rows = arguments(placed)
    args = (trained, buffers, jax.device_put(rows, row_sharding(mesh)))
    return program(definition).lower(*args).compile(), args, mesh


def assert_equal(found, wanted) -> None:
    (loss, counts), gradients = found
    (wanted_loss, wanted_counts), wanted_gradients = wanted
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-5)
    np.testing.assert_array_equal(counts, wanted_counts)
    for path, gradient in wanted_gradients.items():
        scale = np.abs(gradient).max()
        assert np.abs(np.asarray(gradients[path]) - gradient).max() <= 1e-5 * scale, path


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(f"{k}{v}" for k, v in axes.items()))
def test_loss_and_gradients_equal_those_of_one_device(axes):
    """And pairs reach their experts by all-to-all: no expert, nor a gradient of one, crosses that axis."""
    compiled, args, mesh = on_mesh(axes, parameters())
    assert_equal(compiled(*args), expected(one_expert=False))
    found = collectives(compiled, mesh)
    over_experts = [one for one in found if "expert" in one.axes]
    exchanges = [one for one in over_experts if one.kind == "all-to-all"]
    # Tokens there and back, once more there and back in the backward pass, and there for its recomputation;
    # for each of the exchanges there, ids and weights of the pairs, and the number of pairs.
    assert len(exchanges) == (10 if "expert" in axes else 0)
    one_expert_matrix = 4 * CONFIG.hidden_size * CONFIG.moe_intermediate_size
    of_experts = [one for one in over_experts if one.kind in ("all-gather", "reduce-scatter")]
    local = one_expert_matrix * CONFIG.n_routed_experts // mesh.shape.get("tensor", 1)
    assert all(one.bytes < local for one in of_experts), of_experts
    around_the_ring = [one for one in found if one.kind == "collective-permute" and one.axes == ("context",)]
    assert bool(around_the_ring) == ("context" in axes)


def test_every_token_may_choose_the_experts_of_one_device():
    compiled, args, _ = on_mesh({"fsdp": 2, "expert": 4}, chosen_parameters(one_expert=True))
    (_, counts), _ = wanted = expected(one_expert=True)
    valid = int((batch().segment_ids > 0).sum())
    np.testing.assert_array_equal(counts[:, 2:4], valid)
    assert_equal(compiled(*args), wanted)


def test_a_mesh_of_one_device_changes_nothing():
    mesh = MeshSpec(ici={"fsdp": 1, "expert": 1, "context": 1}).build(jax.devices()[:1])
    assert define(CONFIG).on(mesh) == define(CONFIG)
