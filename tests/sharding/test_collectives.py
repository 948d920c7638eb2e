"""Collectives of compiled programs on 8 devices: right numbers, and on each axis what it should carry."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.collectives import collectives, report, totals
from sharding.errors import ShardingError
from sharding.inspect import assert_sharded
from sharding.mesh import MeshSpec
from sharding.rules import ShardingRules
from sharding.tree import shard

BATCH, EMBED, MLP, LAYERS = 8, 16, 32, 3


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return MeshSpec({"fsdp": 2, "tensor": 4}).build()


def step(params, x):
    """One step of gradient descent of a stack of MLPs, layers scanned."""

    def loss(params):
        def layer(x, weights):
            return jnp.tanh(x @ weights["up"]) @ weights["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def inputs():
    key = iter(jax.random.split(jax.random.key(0), 3))
    params = {
        "up": np.asarray(jax.random.normal(next(key), (LAYERS, EMBED, MLP))) / 4,
        "down": np.asarray(jax.random.normal(next(key), (LAYERS, MLP, EMBED))) / 4,
    }
    return params, np.asarray(jax.random.normal(next(key), (BATCH, EMBED)))


AXES = {"up": ("layer", "embed", "mlp"), "down": ("layer", "mlp", "embed")}


def compiled_step(mesh: Mesh, rules: dict):
    params, x = inputs()
    shardings = ShardingRules({"layer": None, **rules}).shardings(AXES, params, mesh)
    params, x = shard(params, shardings), shard(x, NamedSharding(mesh, P("fsdp")))
    compiled = jax.jit(step, out_shardings=(shardings, None)).lower(params, x).compile()
    return compiled, compiled(params, x)


@pytest.fixture(scope="module")
def single_device():
    return jax.jit(step)(*inputs())


def check_equal(result, expected):
    for found, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


def by_axes(found) -> dict[tuple[str, ...], dict[str, int]]:
    """Executions by axes, then kind."""
    table: dict[tuple[str, ...], dict[str, int]] = {}
    for total in totals(found):
        assert total.complete
        table.setdefault(total.axes, {})[total.kind] = total.executions
    return table


def test_fsdp_gathers_weights_and_reduces_gradients(single_device):
    mesh = MeshSpec({"fsdp": 8}).build()
    compiled, result = compiled_step(mesh, {"embed": "fsdp", "mlp": None})
    check_equal(result, single_device)
    found = collectives(compiled)
    assert {c.axes for c in found} == {("fsdp",)}
    weight = EMBED * MLP * 4
    payload = {total.kind: total.bytes for total in totals(found)}
    # Two weights a layer are gathered whole, in the forward pass and again going back.
    assert payload.pop("all-gather") == 2 * 2 * LAYERS * weight
    # Two gradients a layer are reduced, and the loss, by whichever kind the compiler prefers.
    assert sum(payload.values()) == 2 * LAYERS * weight + 4
    assert payload.keys() <= {"all-reduce", "reduce-scatter"}


def test_explicit_axes_gather_where_the_model_says_so(single_device):
    """With shardings in types the gather is written down, and the numbers and axes are the same."""
    mesh = MeshSpec({"fsdp": 8}, axis_type=AxisType.Explicit).build()
    gathered = jax.tree.map(lambda _: P(), AXES, is_leaf=lambda node: isinstance(node, tuple))

    def explicit_step(params, x):
        def loss(params):
            def layer(x, weights):
                weights = jax.tree.map(jax.sharding.reshard, weights, gathered)
                return jnp.tanh(x @ weights["up"]) @ weights["down"], None

            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params, x = inputs()
    rules = ShardingRules({"layer": None, "embed": "fsdp", "mlp": None})
    shardings = rules.shardings(AXES, params, mesh)
    params, x = shard(params, shardings), shard(x, NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(explicit_step, out_shardings=(shardings, None)).lower(params, x).compile()
        result = compiled(params, x)
    assert_sharded(result[0], shardings)
    check_equal(result, single_device)
    table = by_axes(collectives(compiled))
    assert table.keys() == {("fsdp",)}
    assert table[("fsdp",)]["all-gather"] == 2 * LAYERS


def test_tensor_parallel_reduces_activations_over_its_axis(mesh, single_device):
    compiled, result = compiled_step(mesh, {"embed": None, "mlp": "tensor"})
    check_equal(result, single_device)
    found = collectives(compiled, mesh)
    tensor = [c for c in found if c.axes == ("tensor",)]
    # After `down` going forward and after `up` going back: the activations of half the batch, float32.
    # The backward reduction into the first layer's input has no use, but the scan runs it for every layer.
    assert {c.kind for c in tensor} == {"all-reduce"}
    assert {c.bytes for c in tensor} == {BATCH // 2 * EMBED * 4}
    assert sum(c.executions for c in tensor) == 2 * LAYERS
    # Weights are never gathered; only gradients cross the data axis.
    assert by_axes(found)[("fsdp",)].keys() == {"all-reduce"}


def test_both_axes_together(mesh, single_device):
    compiled, result = compiled_step(mesh, {"embed": "fsdp", "mlp": "tensor"})
    check_equal(result, single_device)
    table = by_axes(collectives(compiled))
    assert "all-gather" in table[("fsdp",)]
    assert "all-reduce" in table[("tensor",)]


def exchange(x_local):
    """One collective of each kind on [8, 16] float32 a device."""
    gathered = jax.lax.all_gather(x_local, "fsdp", tiled=True)
    scattered = jax.lax.psum_scatter(gathered, "tensor", tiled=True)
    turned = jax.lax.all_to_all(scattered, "tensor", 0, 0, tiled=True)
    passed = jax.lax.ppermute(turned, "tensor", [(i, (i + 1) % 4) for i in range(4)])
    return jax.lax.psum(passed, ("fsdp", "tensor"))


@pytest.mark.parametrize("order", ["as built", "tensor axis first", "devices reversed"])
def test_every_kind_has_its_axes_and_bytes_whatever_the_device_order(mesh, order):
    if order == "tensor axis first":
        mesh = Mesh(mesh.devices.T.copy(), ("tensor", "fsdp"), axis_types=mesh.axis_types)
    elif order == "devices reversed":
        mesh = Mesh(mesh.devices[::-1, ::-1].copy(), mesh.axis_names, axis_types=mesh.axis_types)
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P(("fsdp", "tensor"))))
    program = jax.shard_map(
        exchange, mesh=mesh, in_specs=P(("fsdp", "tensor")), out_specs=P(), check_vma=False
    )
    found = collectives(jax.jit(program).lower(x).compile())
    kinds = {c.kind: (set(c.axes), c.bytes, c.wire_bytes, c.executions, c.whole_axes) for c in found}
    assert len(found) == len(kinds)
    assert kinds == {
        "all-gather": ({"fsdp"}, 16 * 16 * 4, 16 * 16 * 4 // 2, 1, True),
        "reduce-scatter": ({"tensor"}, 16 * 16 * 4, 16 * 16 * 4 * 3 // 4, 1, True),
        "all-to-all": ({"tensor"}, 4 * 16 * 4, 4 * 16 * 4 * 3 // 4, 1, True),
        "collective-permute": ({"tensor"}, 4 * 16 * 4, 4 * 16 * 4, 1, True),
        "all-reduce": ({"fsdp", "tensor"}, 4 * 16 * 4, 2 * 4 * 16 * 4 * 7 // 8, 1, True),
    }


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a slice, as far as a mesh looks at one."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "test"
    device_kind: str = "test"


ACROSS_SLICES = """HloModule jit_step, num_partitions=4

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %rs = f32[4,4]{1,0} reduce-scatter(%p), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
  %send = (f32[4,4]{1,0}, u32[], token[]) send(%rs, %after), channel_id=2, is_host_transfer=true, frontend_attributes={TARGET_xla_megascale_transfer_type="KIND"}
  %inside = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,2},{1,3}}, to_apply=%add
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("kind", "target", "expected"),
    [
        # [4, 4] float32 between two slices
        ("ALL_REDUCE", '_xla_megascale_target="{1,2}x{0:3}",', ("all-reduce", 64, 64)),
        ("ALL_GATHER", '_xla_megascale_target="{1:2}x{0:3}",', ("all-gather", 128, 64)),
        ("REDUCE_SCATTER", '_xla_megascale_target="{1,2}x{0:3}",', ("reduce-scatter", 64, 32)),
        (
            "ONE_TO_ONE",
            "_xla_megascale_target={{100000->200000},{100001->200001}},",
            ("collective-permute", 64, 64),
        ),
        ("ALL_TO_ALL", "_xla_megascale_target={{100000,200000},{100001,200001}},", ("all-to-all", 64, 32)),
    ],
)
def test_a_program_of_one_slice_names_the_axes_of_the_whole_mesh(kind, target, expected):
    """Notation as the TPU compiler prints it. The data axis, 2 slices x 2 devices, is inside the tensor axis:
    device 1 of a slice is its second along data, device 2 its first along tensor.
    """
    devices = [Device(i, slice_index=i // 4) for i in range(8)]
    mesh = MeshSpec({"tensor": 2, "data": 2}, dcn={"data": 2}).build(devices)
    text = ACROSS_SLICES.replace("KIND", kind).replace("TARGET", target)
    inside, across, tensor = collectives(text, mesh)
    assert (inside.kind, inside.axes, inside.across_slices) == ("reduce-scatter", ("data",), False)
    assert (across.kind, across.bytes, across.wire_bytes) == expected
    assert (across.axes, across.across_slices) == (("data",), True)
    assert (tensor.kind, tensor.axes, tensor.whole_axes) == ("all-reduce", ("tensor",), True)
    assert "data (DCN)" in report([across])


def test_part_of_an_axis_is_marked(mesh):
    program = jax.shard_map(
        lambda x: jax.lax.psum(x, "tensor", axis_index_groups=[[0, 1], [2, 3]]),
        mesh=mesh,
        in_specs=P("fsdp", "tensor"),
        out_specs=P("fsdp", "tensor"),
        check_vma=False,
    )
    (found,) = collectives(jax.jit(program).lower(jnp.ones((2, 4))).compile(), mesh)
    assert (found.axes, found.group_size, found.whole_axes) == (("tensor",), 2, False)


def test_report_is_a_table_and_says_when_there_is_nothing(mesh):
    compiled, _ = compiled_step(mesh, {"embed": None, "mlp": "tensor"})
    lines = report(collectives(compiled, mesh)).splitlines()
    assert lines[0].split() == ["kind", "axes", "count", "runs", "payload", "on", "the", "wire"]
    assert any(line.split()[:2] == ["all-reduce", "tensor"] for line in lines)
    nothing = jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile()
    assert report(collectives(nothing, mesh)) == "no collectives"


def test_a_program_without_a_mesh_asks_for_one_and_a_smaller_mesh_is_refused(mesh):
    with pytest.raises(ShardingError, match="pass mesh="):
        collectives(jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile())
    compiled, _ = compiled_step(mesh, {"embed": None, "mlp": "tensor"})
    small = MeshSpec({"fsdp": 2}).build(jax.devices()[:2])
    with pytest.raises(ShardingError, match="compiled for 8 devices, but mesh .* has 2"):
        collectives(compiled, small)
