"""Rules: specs by hand, and one error for each way they can fail, naming parameter, axis and sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.errors import ShardingError
from sharding.mesh import MeshSpec
from sharding.rules import ShardingRules, logical_axes_of

AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)

RULES = ShardingRules(
    {"embed": "fsdp", "mlp": "tensor", "vocab": ["fsdp", "tensor"], "heads": "tensor", "layer": None}
)


@pytest.fixture(scope="module", params=AXIS_TYPES)
def mesh(request):
    return MeshSpec({"fsdp": 2, "tensor": 4}, axis_type=request.param).build()


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("embed", "mlp"), (6, 8), P("fsdp", "tensor")),
        (("layer", "embed", None), (3, 2, 5), P(None, "fsdp")),
        (("vocab", None), (16, 3), P(("fsdp", "tensor"))),
        ((), (), P()),
        (("layer",), (7,), P()),
        (None, (7, 5), P()),
    ],
)
def test_spec(mesh, axes, shape, expected):
    assert RULES.spec(axes, shape, mesh) == expected


@pytest.mark.parametrize(
    ("axes", "shape", "parts"),
    [
        (
            ("mlp", "heads"),
            (8, 8),
            [
                "moe/up: mesh axis 'tensor'",
                "dimension 0 by rule 'mlp' -> 'tensor'",
                "dimension 1 by rule 'heads'",
            ],
        ),
        (
            ("embed", "vocab"),
            (8, 8),
            ["mesh axis 'fsdp'", "'embed' -> 'fsdp'", "'vocab' -> ('fsdp', 'tensor')"],
        ),
        (
            ("vocab",),
            (12,),
            ["moe/up: dimension 0 ('vocab') of size 12", "divisible by 8 = fsdp(2) x tensor(4)"],
        ),
        (("embed",), (4, 4), ["moe/up: 1 logical axes", "rank 2"]),
        (("embd", None), (4, 4), ["moe/up: no rule for logical axis 'embd'", "'embed'"]),
    ],
)
def test_errors_name_the_parameter_the_axes_and_the_sizes(mesh, axes, shape, parts):
    with pytest.raises(ShardingError) as raised:
        RULES.spec(axes, shape, mesh, name="moe/up")
    for part in parts:
        assert part in str(raised.value)


def test_a_mesh_axis_that_is_absent_is_an_error_until_the_rules_are_restricted():
    mesh = MeshSpec({"fsdp": 8}).build()
    with pytest.raises(ShardingError, match=r"'mlp' -> 'tensor' names mesh axis 'tensor', absent"):
        RULES.spec(("embed", "mlp"), (8, 8), mesh)
    restricted = RULES.restricted_to(mesh)
    assert restricted.spec(("embed", "mlp"), (8, 8), mesh) == P("fsdp")
    assert restricted.spec(("vocab",), (8,), mesh) == P("fsdp")


def test_shardings_follow_the_structure_of_the_shapes(mesh):
    axes = {"dense": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}, "step": ()}
    shapes = {
        "dense": {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.float32), "bias": (8,)},
        "step": jnp.zeros(()),
    }
    found = RULES.shardings(axes, shapes, mesh)
    assert found == {
        "dense": {
            "kernel": NamedSharding(mesh, P("fsdp", "tensor")),
            "bias": NamedSharding(mesh, P("tensor")),
        },
        "step": NamedSharding(mesh, P()),
    }


def test_shardings_report_every_failing_leaf_at_once(mesh):
    axes = {"a": ("embed",), "b": ("mlp",), "c": ("mlp",)}
    with pytest.raises(ShardingError) as raised:
        RULES.shardings(axes, {"a": (3,), "b": (4,), "c": (6,)}, mesh)
    assert [line.split(":")[0] for line in str(raised.value).splitlines()] == ["a", "c"]


def test_leaves_on_one_side_only_are_named(mesh):
    with pytest.raises(ShardingError) as raised:
        RULES.shardings({"a": ("embed",), "x": ("embed",)}, {"a": (4,), "b": (4,)}, mesh)
    assert "x: has logical axes but no array" in str(raised.value)
    assert "b: has no logical axes" in str(raised.value)


AXES, ARRAYS = {"up": ("embed", "mlp")}, {"up": jax.ShapeDtypeStruct((4, 8), jnp.float32)}


@pytest.mark.parametrize(
    ("order", "parts"),
    [
        (
            "mesh params axes",
            ["mesh: found dict {'up': ('embed', 'mlp')}", "logical_axes is a mesh: the order"],
        ),
        ("axes mesh params", ["mesh: found dict", "shapes is a mesh: the order"]),
        (
            "params axes mesh",
            [
                "up: logical_axes: found an array float32[4, 8], expected a tuple of names",
                "up/0: shapes: found str 'embed', expected an array",
                "The order is shardings(logical_axes, shapes, mesh)",
            ],
        ),
        ("axes params spec", ["found a MeshSpec, expected a jax.sharding.Mesh; build the mesh first"]),
        ("names params mesh", ["up: logical_axes: found str 'embed mlp', expected a tuple of names"]),
    ],
)
def test_arguments_in_another_order_are_named_with_what_was_expected(mesh, order, parts):
    given = {
        "mesh": mesh,
        "params": ARRAYS,
        "axes": AXES,
        "spec": MeshSpec({"fsdp": 8}),
        "names": {"up": "embed mlp"},
    }
    with pytest.raises(ShardingError) as raised:
        RULES.shardings(*(given[name] for name in order.split()))
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        ("embed", (4,), "up: logical_axes: found str 'embed', expected a tuple of names"),
        ((4, 8), (4, 8), r"up: logical_axes: found tuple \(4, 8\), expected a tuple of names"),
        (("embed",), ("embed",), r"up: shape: found tuple \('embed',\), expected a tuple of sizes"),
        (("embed",), 4, "up: shape: found int 4, expected a tuple of sizes"),
    ],
)
def test_a_spec_of_the_wrong_things_says_what_was_expected(mesh, axes, shape, message):
    with pytest.raises(ShardingError, match=message):
        RULES.spec(axes, shape, mesh, name="up")
    with pytest.raises(ShardingError, match=r"mesh: found .*; shape is a mesh: the order is spec\(logical"):
        RULES.spec(axes, mesh, shape)


def test_a_rule_given_twice_is_an_error():
    with pytest.raises(ShardingError, match=r"\['embed'\] have more than one rule"):
        ShardingRules((("embed", "fsdp"), ("embed", None)))


def test_linen_boxes_declare_their_axes(mesh):
    from flax import linen

    initializer = linen.with_logical_partitioning(linen.initializers.ones, ("embed", "mlp"))
    shapes = jax.eval_shape(linen.Dense(8, kernel_init=initializer).init, jax.random.key(0), jnp.ones((2, 4)))
    axes = logical_axes_of(shapes)
    assert axes == {"params": {"kernel": ("embed", "mlp"), "bias": None}}
    found = RULES.shardings(axes, shapes, mesh)
    assert jax.tree.structure(found) == jax.tree.structure(shapes)
    assert found["params"]["kernel"].value == NamedSharding(mesh, P("fsdp", "tensor"))


def test_nnx_variables_declare_their_axes(mesh):
    from flax import nnx

    kernel = nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", "mlp"), eager_sharding=False)
    state = nnx.State({"kernel": kernel, "bias": nnx.Param(jnp.ones((8,)))})
    axes = logical_axes_of(state)
    assert axes == {"kernel": ("embed", "mlp"), "bias": None}
    found = RULES.shardings(axes, state, mesh)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert jax.tree.leaves(found)[1] == NamedSharding(mesh, P("fsdp", "tensor"))
