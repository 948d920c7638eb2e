"""A step on 8 devices is the step on one, whichever axes share the work, and communicates as planned."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxtrain.data.batch import Batch
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.base import REPLAYED
from jaxtrain.losses.next_token import NextToken
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.replay import CHOOSE
from jaxtrain.models.sharding_rules import parameter_shardings, row_sharding
from sharding.collectives import collectives
from sharding.mesh import MeshSpec
from tests.jaxtrain.models.forward import CONFIG, perturbed_parameters

MESHES = [{"fsdp": 2, "expert": 4}, {"expert": 2, "context": 2, "tensor": 2}]  # between them, every axis
MORE_MESHES = [
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 2, "context": 4},
    {"data": 2, "expert": 4},
]
WITH_MTP = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
BALANCE = 0.1  # weight of the balance loss, and of MTP's: enough for their gradients to count
ROWS, LENGTH = 8, 32


@cache
def parameters(config: ModelConfig = CONFIG) -> dict[str, jax.Array]:
    return perturbed_parameters(seed=0, config=config)


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
    """Loss with the balance loss and MTP's, the experts' load, and gradients."""

    def objective(trained, buffers, batch):
        out = NextToken()(definition, {**trained, **buffers}, batch)
        further = 0.0 if out.mtp is None else out.mtp
        return out.loss + BALANCE * (out.router.balance.sum() + further), out.router.counts

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def arguments(params: dict[str, jax.Array], config: ModelConfig, batch: Batch):
    buffers = define(config).buffers
    trained = {path: value for path, value in params.items() if path not in buffers}
    return trained, {path: params[path] for path in buffers}, batch


@cache
def on_one_device():
    """Compiled once, whatever the parameters."""
    return program(define(CONFIG))


@cache
def expected(one_expert: bool):
    return on_one_device()(*arguments(chosen_parameters(one_expert), CONFIG, batch()))


def chosen_parameters(one_expert: bool) -> dict[str, jax.Array]:
    if not one_expert:
        return parameters()
    bias = jnp.zeros((CONFIG.num_moe_layers, CONFIG.n_routed_experts)).at[:, 3].set(100.0).at[:, 2].set(90.0)
    return {**parameters(), "moe/mlp/router/correction_bias": bias}


def place(mesh: Mesh, params: dict[str, jax.Array], config: ModelConfig, batch: Batch):
    """The program's arguments on the mesh."""
    shardings = parameter_shardings(define(config), mesh)
    placed = {path: jax.device_put(value, shardings[path]) for path, value in params.items()}
    return arguments(placed, config, jax.device_put(batch, row_sharding(mesh)))


@cache
def on_mesh(**axes: int):
    """The compiled program, and the mesh."""
    mesh = MeshSpec(ici=axes).build()
    args = place(mesh, parameters(), CONFIG, batch())
    return program(define(CONFIG).on(mesh)).lower(*args).compile(), mesh


def assert_equal(found, wanted) -> None:
    (loss, counts), gradients = found
    (wanted_loss, wanted_counts), wanted_gradients = wanted
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-5)
    np.testing.assert_array_equal(counts, wanted_counts)
    for path, gradient in wanted_gradients.items():
        scale = np.abs(gradient).max()
        assert np.abs(np.asarray(gradients[path]) - gradient).max() <= 1e-5 * scale, path


def name(axes: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in axes.items())


@pytest.mark.parametrize(
    "axes",
    [
        *(pytest.param(axes, id=name(axes)) for axes in MESHES),
        *(pytest.param(axes, id=name(axes), marks=pytest.mark.faults) for axes in MORE_MESHES),
    ],
)
def test_loss_and_gradients_equal_those_of_one_device(axes):
    """And pairs reach their experts by all-to-all: no expert, nor a gradient of one, crosses that axis."""
    compiled, mesh = on_mesh(**axes)
    args = place(mesh, parameters(), CONFIG, batch())
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


@pytest.mark.proof
def test_every_token_may_choose_the_experts_of_one_device():
    compiled, mesh = on_mesh(fsdp=2, expert=4)
    args = place(mesh, chosen_parameters(one_expert=True), CONFIG, batch())
    (_, counts), _ = wanted = expected(one_expert=True)
    valid = int((batch().segment_ids > 0).sum())
    np.testing.assert_array_equal(counts[:, 2:4], valid)
    assert_equal(compiled(*args), wanted)


@pytest.mark.proof
def test_mtp_and_replayed_experts_are_those_of_one_device():
    """Where further tokens and replayed experts of a document lie on two devices."""
    shape = (ROWS, LENGTH, WITH_MTP.num_moe_layers, WITH_MTP.num_experts_per_tok)
    ids = np.random.default_rng(2).integers(CHOOSE, WITH_MTP.n_routed_experts, shape)
    replayed = Batch(batch().columns | {REPLAYED: ids.astype(np.int16)})
    params = parameters(WITH_MTP)
    alone = program(define(WITH_MTP))
    wanted = alone(*arguments(params, WITH_MTP, replayed))
    free = Batch(batch().columns | {REPLAYED: np.full_like(replayed[REPLAYED], CHOOSE)})
    (_, free_counts), _ = alone(*arguments(params, WITH_MTP, free))
    assert (free_counts != wanted[0][1]).any()
    mesh = MeshSpec(ici={"expert": 2, "fsdp": 2, "context": 2}).build()
    found = program(define(WITH_MTP).on(mesh))(*place(mesh, params, WITH_MTP, replayed))
    assert_equal(found, wanted)


def test_a_mesh_of_one_device_changes_nothing():
    mesh = MeshSpec(ici={"fsdp": 1, "expert": 1, "context": 1}).build(jax.devices()[:1])
    assert define(CONFIG).on(mesh) == define(CONFIG)
