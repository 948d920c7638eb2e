"""How activations are sharded: rows over some mesh axes, the sequence over another, heads over a third."""

from __future__ import annotations

from typing import TypeGuard

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtrain.config.division import ROW_AXES

SEQUENCE_AXIS = "context"
TENSOR_AXIS = "tensor"
FSDP_AXIS = "fsdp"
EXPERT_AXIS = "expert"


def axis_size(mesh: Mesh | None, axis: str) -> int:
    """Devices along a mesh axis, 1 where the mesh lacks it."""
    return 1 if mesh is None else mesh.shape.get(axis, 1)


def spans_devices(mesh: Mesh | None) -> TypeGuard[Mesh]:
    return mesh is not None and mesh.size > 1


def activation_spec(mesh: Mesh | AbstractMesh, *rest: str | None) -> PartitionSpec:
    """Partition of an array [row, sequence, *rest]; axes that the mesh lacks are left out."""
    rows = tuple(axis for axis in ROW_AXES if axis in mesh.axis_names)
    named = [axis if axis in mesh.axis_names else None for axis in (SEQUENCE_AXIS, *rest)]
    while named and named[-1] is None:
        named.pop()
    return PartitionSpec(rows, *named)


def constrain(x_BSx: jax.Array, mesh: Mesh | None) -> jax.Array:
    """The same activations [row, sequence, ...] with their sharding stated; unchanged on one device."""
    if not spans_devices(mesh):
        return x_BSx
    return jax.lax.with_sharding_constraint(x_BSx, NamedSharding(mesh, activation_spec(mesh)))


def platform(mesh: Mesh | AbstractMesh | None) -> str:
    """cpu, gpu or tpu: of the mesh's devices, which may belong to a topology used only for compilation.

    Without devices, the default one.
    """
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
