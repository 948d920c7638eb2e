"""Meshes: sizes, order of devices, and errors that name what was asked and what was found."""

from __future__ import annotations

import importlib.util

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from sharding.errors import ShardingError
from sharding.mesh import MeshSpec, topology_devices


def ids(mesh) -> list:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def test_rest_axis_takes_the_remaining_devices_and_order_is_row_major():
    mesh = MeshSpec({"data": -1, "tensor": 4}).build()
    assert mesh.axis_names == ("data", "tensor")
    assert ids(mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_axis_types_are_explicit_in_both_settings():
    assert MeshSpec({"data": 8}).build().axis_types == (AxisType.Auto,)
    explicit = MeshSpec({"data": 2, "tensor": 4}, axis_type=AxisType.Explicit).build()
    assert explicit.axis_types == (AxisType.Explicit, AxisType.Explicit)


def test_dcn_axis_of_its_own_is_outermost():
    mesh = MeshSpec({"data": 2, "tensor": 2}, dcn={"replica": 2}).build()
    assert dict(mesh.shape) == {"replica": 2, "data": 2, "tensor": 2}
    assert ids(mesh) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_axis_in_both_multiplies_with_groups_outermost():
    """data = 2 (DCN) x 2 (ICI): rows 0-1 come from the first four devices, rows 2-3 from the others."""
    mesh = MeshSpec({"tensor": 2, "data": 2}, dcn={"data": 2}).build()
    assert dict(mesh.shape) == {"tensor": 2, "data": 4}
    assert ids(mesh) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_dcn_may_be_the_rest():
    assert dict(MeshSpec({"tensor": 4}, dcn={"data": -1}).build().shape) == {"data": 2, "tensor": 4}


class Device:
    """The attributes of a device that grouping reads."""

    def __init__(self, number: int, *, slice_index: int, process_index: int):
        self.id, self.slice_index, self.process_index = number, slice_index, process_index
        self.platform = self.device_kind = "test"


def test_groups_are_slices_before_processes():
    """Slices alternate by device id, so grouping by anything else gives another order."""
    devices = [Device(i, slice_index=i % 2, process_index=i // 2) for i in range(8)]
    mesh = MeshSpec({"tensor": 4}, dcn={"data": 2}).build(devices)
    assert ids(mesh) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_processes_are_merged_when_one_slice_holds_them_all():
    devices = [Device(i, slice_index=0, process_index=i // 2) for i in range(8)]
    assert ids(MeshSpec({"tensor": 4}, dcn={"data": 2}).build(devices)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_that_do_not_exist_are_an_error_with_counts():
    devices = [Device(i, slice_index=0, process_index=0) for i in range(8)]
    with pytest.raises(
        ShardingError, match=r"ask for 2 groups.*found 1 by slice_index and 1 by process_index"
    ):
        MeshSpec({"tensor": 4}, dcn={"data": 2}).build(devices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ici": {"data": 3}}, r"multiply to 3, which are not the 8 devices"),
        ({"ici": {"data": 4}}, r"multiply to 4, which are not the 8 devices"),
        ({"ici": {"data": -1, "tensor": 3}}, r"multiply to 3, which do not divide the 8 devices"),
        ({"ici": {"data": -1, "tensor": -1}}, r"more than one axis is -1"),
        ({"ici": {"data": 0}}, r"ici\['data'\]: size 0 is neither"),
        ({"ici": (("data", 2), ("data", 4))}, r"axis named twice"),
        ({"ici": {}}, r"no axes"),
    ],
)
def test_sizes_that_cannot_work_are_named(arguments, message):
    with pytest.raises(ShardingError, match=message):
        MeshSpec(**arguments).build()


def test_equality_minds_the_order_of_axes_and_specs_hash():
    assert MeshSpec({"a": 2, "b": 4}) == MeshSpec((("a", 2), ("b", 4)))
    assert len({MeshSpec({"a": 2, "b": 4}), MeshSpec({"b": 4, "a": 2})}) == 2


def test_a_subset_of_devices_can_be_given():
    assert ids(MeshSpec({"data": 2}).build(jax.devices()[4:6])) == [4, 5]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_an_abstract_mesh_has_the_axes_of_the_built_one(axis_type):
    spec = MeshSpec({"tensor": 2, "data": -1}, dcn={"data": 2, "replica": 1}, axis_type=axis_type)
    abstract, built = spec.abstract(8), spec.build()
    assert abstract.axis_names == built.axis_names == ("replica", "tensor", "data")
    assert dict(abstract.shape) == dict(built.shape) == {"replica": 1, "tensor": 2, "data": 4}
    assert abstract.axis_types == built.axis_types
    with pytest.raises(ShardingError, match="multiply to 4, which do not divide the 6 devices"):
        spec.abstract(6)


def test_topology_without_the_tpu_compiler_names_the_remedy_and_with_it_has_its_chips():
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ShardingError, match=r"v5p:2x2x1.*pip install 'jax\[tpu\]'"):
            topology_devices("v5p:2x2x1")
    else:
        assert MeshSpec({"data": -1}).topology("v5p:2x2x1").size == 4
