"""Muon: optax as the oracle on one device, one device as the oracle of many."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.optim.muon import MuonConfig, layout_of, scale_by_muon
from jaxtrain.optim.newton_schulz import Algorithm, Normalization
from tests.jaxtrain.optim.muon_steps import directions_of, gradients_of


def test_equals_optax_muon_over_stacked_matrices():
    """Without Nesterov, where optax differs from torch by the bias correction of its two terms."""
    gradients = gradients_of({"w": (2, 3, 12, 8), "v": (2, 8, 12)})
    dimension = {"w": optax.contrib.MuonDimensionNumbers(2, 3), "v": optax.contrib.MuonDimensionNumbers(1, 2)}
    reference = optax.contrib.muon(
        1.0, consistent_rms=0.2, nesterov=False, muon_weight_dimension_numbers=lambda _: dimension
    )
    params = jax.tree.map(jnp.zeros_like, gradients[0])
    state = reference.init(params)
    found, _ = directions_of(MuonConfig(nesterov=False), gradients)
    for step, gradient in enumerate(gradients):
        updates, state = reference.update(gradient, state, params)
        for path in gradient:
            np.testing.assert_allclose(found[step][path], -updates[path], atol=1e-4)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_update_rms_is_the_configured_one_for_every_shape(algorithm):
    """arXiv 2502.16982, equation 4: an orthogonal A x B matrix has root mean square sqrt(1 / max(A, B))."""
    config = MuonConfig(
        algorithm=algorithm, coefficients="polar_express", newton_schulz_steps=8, update_rms=0.2
    )
    found, _ = directions_of(config, gradients_of({"w": (3, 8, 40), "v": (40, 8), "s": (20, 20)}, steps=1))
    for direction in found[0].values():
        rms = jnp.sqrt(jnp.mean(jnp.square(direction), axis=(-2, -1)))
        np.testing.assert_allclose(rms, 0.2, rtol=0.02)


def test_grouping_changes_nothing():
    gradients = gradients_of({"a": (2, 3, 8, 12), "b": (8, 12), "c": (2, 8, 12)}, steps=1)
    together, _ = directions_of(MuonConfig(), gradients)
    for path in gradients[0]:
        alone, _ = directions_of(MuonConfig(), [{path: g[path]} for g in gradients])
        np.testing.assert_allclose(together[0][path], alone[0][path], atol=1e-5)


def test_split_heads_orthogonalises_each_head_alone():
    gradients = gradients_of({"q": (2, 8, 3 * 4)}, steps=1)
    layouts = {"q": layout_of(gradients[0]["q"], head_width=4)}
    assert layouts["q"].matrix == (8, 4)
    assert layouts["q"].count == 6
    found, _ = directions_of(MuonConfig(), gradients, layouts)
    for head in range(3):
        columns = slice(4 * head, 4 * head + 4)
        alone, _ = directions_of(MuonConfig(), [{"q": gradients[0]["q"][..., columns]}])
        np.testing.assert_allclose(found[0]["q"][..., columns], alone[0]["q"], atol=1e-6)
    with pytest.raises(ValueError, match="q: 12 columns are not whole heads of 5"):
        scale_by_muon(MuonConfig(), {"q": layout_of(gradients[0]["q"], head_width=5)})


def test_momentum_is_stored_as_configured():
    gradients = gradients_of({"w": (8, 12)})
    found, state = directions_of(MuonConfig(momentum_dtype="bfloat16"), gradients)
    exact, _ = directions_of(MuonConfig(), gradients)
    assert state.momentum["w"].dtype == jnp.bfloat16
    assert found[-1]["w"].dtype == jnp.float32
    np.testing.assert_allclose(found[-1]["w"], exact[-1]["w"], atol=0.05)


# Sharded: path -> (shape, spec). Four matrix shapes or placements, so four groups.
SHARDED = {
    "experts/gate": ((2, 4, 16, 8), PartitionSpec(None, "expert", "fsdp", "tensor")),
    "experts/up": ((2, 4, 16, 8), PartitionSpec(None, "expert", "fsdp", "tensor")),
    "experts/down": ((2, 4, 8, 16), PartitionSpec(None, "expert", "tensor", "fsdp")),
    "dense": ((3, 16, 8), PartitionSpec(None, ("expert", "fsdp"), None)),
    "head": ((16, 24), PartitionSpec("fsdp", ("expert", "tensor"))),
}


def _shard(tree, mesh):
    return {p: jax.device_put(x, NamedSharding(mesh, SHARDED[p][1])) for p, x in tree.items()}


def _mesh(axis_type):
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(devices, ("expert", "fsdp", "tensor"), axis_types=(axis_type,) * 3)


@pytest.fixture(scope="module")
def mesh():
    return _mesh(AxisType.Auto)


@pytest.mark.parametrize(("algorithm", "axis_type"), [("direct", AxisType.Auto), ("gram", AxisType.Explicit)])
def test_many_devices_give_what_one_gives(algorithm, axis_type):
    mesh = _mesh(axis_type)
    gradients = gradients_of({path: shape for path, (shape, _) in SHARDED.items()}, steps=2)
    config = MuonConfig(algorithm=algorithm)
    expected, _ = directions_of(config, gradients)
    found, state = directions_of(config, [_shard(gradient, mesh) for gradient in gradients])
    for step in range(2):
        for path in SHARDED:
            assert found[step][path].sharding.is_equivalent_to(
                NamedSharding(mesh, SHARDED[path][1]), found[step][path].ndim
            )
            assert state.momentum[path].sharding == NamedSharding(mesh, SHARDED[path][1])
            np.testing.assert_allclose(found[step][path], expected[step][path], atol=2e-5)


def _collectives(config, gradients):
    transform = scale_by_muon(config, {p: layout_of(g) for p, g in gradients.items()})
    state = transform.init(gradients)
    text = jax.jit(transform.update).lower(gradients, state).compile().as_text()
    kinds = re.findall(
        r"= \S.*? (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)\(", text
    )
    return {kind: kinds.count(kind) for kind in set(kinds)}


def test_two_all_to_alls_per_group_and_nothing_else_but_sharing(mesh):
    """`dense` is replicated over tensor, whose two devices each take half and gather the results. `head`, one
    matrix for 8 devices, is shared: its Gram matrix is summed in each of 5 steps.
    """
    gradients = _shard(gradients_of({path: shape for path, (shape, _) in SHARDED.items()}, steps=1)[0], mesh)
    assert _collectives(MuonConfig(), gradients) == {"all-to-all": 8, "all-gather": 1, "all-reduce": 5}


# One matrix cut in 8 each: on one device it would leave 7 idle. Long side cut, short side cut, both, and a
# long side that does not divide among the devices.
LONE = {
    "long": ((8, 64), PartitionSpec(None, ("expert", "fsdp", "tensor"))),
    "short": ((64, 8), PartitionSpec(None, ("expert", "fsdp", "tensor"))),
    "both": ((16, 64), PartitionSpec("fsdp", ("expert", "tensor"))),
    "uneven": ((1, 8, 28), PartitionSpec(None, ("expert", "fsdp"), "tensor")),
}


@pytest.mark.parametrize(("algorithm", "reductions"), [(Algorithm.gram, 1), (Algorithm.direct, 5)])
def test_lone_large_matrices_are_shared_by_all_devices(mesh, algorithm, reductions):
    values = gradients_of({path: shape for path, (shape, _) in LONE.items()}, steps=1)[0]
    sharded = {p: jax.device_put(x, NamedSharding(mesh, LONE[p][1])) for p, x in values.items()}
    config = MuonConfig(algorithm=algorithm, normalization=Normalization.schatten8)
    expected, _ = directions_of(config, [values])
    found, _ = directions_of(config, [sharded])
    for path in LONE:
        np.testing.assert_allclose(found[0][path], expected[0][path], atol=2e-5)
    assert _collectives(config, {"long": sharded["long"]}) == {"all-reduce": reductions}
    assert _collectives(config, {"both": sharded["both"]}) == {"all-to-all": 2, "all-reduce": reductions}


def test_matrices_cut_only_by_expert_or_layer_need_no_communication(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", ("expert", "tensor")))
    gradients = {"w": jax.device_put(jnp.ones((2, 4, 6, 8)), sharding)}
    assert _collectives(MuonConfig(), gradients) == {}


def test_heads_are_split_where_they_are(mesh):
    """Columns sharded by whole heads: only the rows' axis communicates; half a head a device is refused."""
    value = gradients_of({"q": (1, 8, 16)}, steps=1)[0]["q"]
    sharded = jax.device_put(value, NamedSharding(mesh, PartitionSpec(None, "fsdp", ("expert", "tensor"))))
    expected, _ = directions_of(MuonConfig(), [{"q": value}], {"q": layout_of(value, head_width=4)})
    found, _ = directions_of(MuonConfig(), [{"q": sharded}], {"q": layout_of(sharded, head_width=4)})
    np.testing.assert_allclose(found[0]["q"], expected[0]["q"], atol=1e-5)
    with pytest.raises(
        ValueError, match=r"a device's 4 columns .* are not whole heads of 8; shard the heads over"
    ):
        scale_by_muon(MuonConfig(), {"q": layout_of(sharded, head_width=8)})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("algorithm", "fast", r"muon.algorithm: found 'fast', expected one of \['direct', 'gram'\]"),
        ("momentum", 1.0, "muon.momentum: found 1.0"),
        ("iteration_dtype", "int32", "muon.iteration_dtype: found int32, expected a floating type"),
        ("coefficients", "none", "found 'none', expected one of"),
    ],
)
def test_wrong_settings_name_the_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        scale_by_muon(MuonConfig(**{field: value}), {})
