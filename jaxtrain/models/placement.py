"""How activations lie on the mesh: rows over some axes, the sequence over another, heads over a third."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROW_AXES = ("data", "fsdp", "expert")  # mesh axes that split the rows of a batch
SEQUENCE_AXIS = "context"
TENSOR_AXIS = "tensor"
FSDP_AXIS = "fsdp"
EXPERT_AXIS = "expert"


def axis_size(mesh: Mesh | None, axis: str) -> int:
    """Devices along a mesh axis, 1 where the mesh lacks it."""
    return 1 if mesh is None else mesh.shape.get(axis, 1)


def spans_devices(mesh: Mesh | None) -> bool:
    return mesh is not None and mesh.size > 1


def activation_spec(mesh: Mesh, *rest: str | None) -> PartitionSpec:
    """Of an array [row, sequence, *rest]; axes that the mesh lacks are left out."""
    rows = tuple(axis for axis in ROW_AXES if axis in mesh.axis_names)
    named = [axis if axis in mesh.axis_names else None for axis in (SEQUENCE_AXIS, *rest)]
    while named and named[-1] is None:
        named.pop()
    return PartitionSpec(rows, *named)


def constrain(x_BSx: jax.Array, mesh: Mesh | None) -> jax.Array:
    """The same activations [row, sequence, ...], told where they live; unchanged without a mesh."""
    if not spans_devices(mesh):
        return x_BSx
    return jax.lax.with_sharding_constraint(x_BSx, NamedSharding(mesh, activation_spec(mesh)))


def platform(mesh: Mesh | None) -> str:
    """cpu, gpu or tpu: of the mesh's devices, which may be of a topology that is only compiled for."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
