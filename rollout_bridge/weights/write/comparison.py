"""Programs that compare bits on every device of this process, without communication between devices.

Arrays here are those of `of_process`: the shards of one array side by side, however it was sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rollout_bridge.quantization import device
from rollout_bridge.weights.write.derivation import Bits, shard_data


def class_start(bits: np.dtype) -> int:
    """The exponent field at which the codec's classes start: the last is 0.5 to 1 for BF16 and float32."""
    return 0 if bits.itemsize == 1 else 112


def of_process(array: jax.Array) -> jax.Array:
    """The shards of this process side by side along the first axis, without moving them."""
    shards = [shard_data(shard) for shard in array.addressable_shards]
    mesh = Mesh(np.array([shard.device for shard in array.addressable_shards]), ("device",))
    shape = (len(shards) * shards[0].shape[0], *shards[0].shape[1:])
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def local_bits(array: jax.Array, place: int) -> np.ndarray:
    """The part of shard number `place` on the host."""
    return np.asarray(shard_data(array.addressable_shards[place]))


def _on_each_device(function: Callable[..., Any], mesh: Mesh, *sharded: Any, first: Any = 0) -> Any:
    """`function(*shards, first)` on every device of `mesh`; results get an axis of devices in front."""
    spec = PartitionSpec("device")

    def local(first: jax.Array, *shards: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], function(*shards, first))

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), *(spec for _ in sharded)),
        out_specs=spec,
        check_vma=False,
    )
    return mapped(first, *sharded)


def row_counts(old: Bits, new: Bits, rows: tuple[tuple[str, int], ...]) -> dict[str, jax.Array]:
    """int32[devices, rows] by key. Arrays on different devices are counted by different programs."""
    by_mesh: dict[Mesh, list[tuple[str, int]]] = {}
    for key, count in rows:
        by_mesh.setdefault(mesh_of(old[key]), []).append((key, count))
    result = {}
    for mesh, group in by_mesh.items():
        keys = [key for key, _ in group]
        result |= _counts(
            {key: old[key] for key in keys}, {key: new[key] for key in keys}, rows=tuple(group), mesh=mesh
        )
    return result


def mesh_of(array: jax.Array) -> Mesh:
    """The mesh of an array of `of_process`."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding.mesh


@functools.partial(jax.jit, static_argnames=("rows", "mesh"))
def _counts(old: Bits, new: Bits, *, rows: tuple[tuple[str, int], ...], mesh: Mesh) -> Bits:
    def count(old: Bits, new: Bits, _: jax.Array) -> Bits:
        return {
            key: jnp.sum((old[key] != new[key]).reshape(height, -1), axis=1, dtype=jnp.int32)
            for key, height in rows
        }

    return _on_each_device(count, mesh, old, new)


@functools.partial(jax.jit, static_argnames=("rows", "height", "mesh"))
def rows_of(array: jax.Array, first: int, *, rows: int, height: int, mesh: Mesh) -> jax.Array:
    """[devices, height, ...]: rows [first, first + height) of the `rows` of each shard."""

    def part(array: jax.Array, first: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array.reshape(rows, -1), first, height)

    return _on_each_device(part, mesh, array, first=first)


@functools.partial(jax.jit, static_argnames=("rows", "height", "slots", "mesh"))
def compact(
    old: jax.Array, new: jax.Array, first: int, *, rows: int, height: int, slots: int, mesh: Mesh
) -> tuple[device.CompactedChanges, jax.Array, jax.Array]:
    """Changes in rows [first, first + height) of each shard, in `slots` slots, with `device.class_ranks`."""

    def part(old: jax.Array, new: jax.Array, first: jax.Array) -> tuple:
        old, new = (
            lax.dynamic_slice_in_dim(array.reshape(rows, 1, -1), first, height) for array in (old, new)
        )
        changes = device.diff_compact(new, old, slots)
        return changes, *device.class_ranks(old, changes.positions, start=class_start(old.dtype))

    return _on_each_device(part, mesh, old, new, first=first)
