"""Placing trees on a mesh: shard, replicate, reshard, and between host-local and global arrays.

Every function takes and returns any pytree: dicts, optax states, NNX State, Linen trees with boxed
parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from sharding.errors import ShardingError
from sharding.leaves import named_leaves


def shard(tree: Any, shardings: Any) -> Any:
    """Place every leaf by its sharding; every process passes the same full values.

    Args:
      tree: numpy or jax arrays, or scalars.
      shardings: one sharding for all, or a tree with the structure of `tree`.
    """
    return _map(_place, tree, shardings)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Place every leaf whole on every device of `mesh`."""
    return shard(tree, NamedSharding(mesh, PartitionSpec()))


def reshard(tree: Any, shardings: Any) -> Any:
    """Move arrays that are on devices to other shardings; across processes both must use the same devices."""

    def move(array: Any, sharding: Sharding) -> jax.Array:
        if sharding.is_fully_addressable and getattr(array, "is_fully_addressable", True):
            return jax.device_put(array, sharding)
        return jax.jit(lambda x: x, out_shardings=sharding)(array)

    return _map(move, tree, shardings)


def to_global(tree: Any, shardings: Any) -> Any:
    """Global arrays from the part that each process holds.

    Args:
      tree: numpy arrays, each this process's block of the global array (the whole array where its sharding
        does not split it between processes).
      shardings: one sharding for all, or a tree with the structure of `tree`.
    """
    return _map(lambda x, s: jax.make_array_from_process_local_data(s, np.asarray(x)), tree, shardings)


def to_local(tree: Any) -> Any:
    """The block of each array that this process holds, as numpy; the inverse of `to_global`.

    Raises ShardingError for an array whose local shards do not form one rectangle.
    """
    names = iter(leaf.name for leaf in named_leaves(tree))
    return jax.tree.map(lambda x: _local_block(x, next(names)), tree)


def gather(tree: Any) -> Any:
    """Every array whole, as numpy, in every process. Collective across processes; needs the host memory."""
    return jax.tree.map(
        lambda x: (
            np.asarray(x)
            if getattr(x, "is_fully_addressable", True)
            else np.asarray(multihost_utils.process_allgather(x, tiled=True))
        ),
        tree,
    )


def shardings_like(tree: Any, parameters: Any, shardings: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shardings for a tree that repeats parameters, such as an optimizer state; the rest is replicated.

    Args:
      tree: arrays or ShapeDtypeStructs, whose leaf names end in parameter names where they repeat them.
      parameters: the parameters, or their ShapeDtypeStructs.
      shardings: their shardings, in the same structure.
      mesh: for the replicated rest (counters; moments of another shape, as in factored optimizers).

    Returns:
      NamedShardings in the structure of `tree`.
    """
    placed = jax.tree.leaves(shardings)
    known = {
        leaf.name: (leaf.value.shape, sharding)
        for leaf, sharding in zip(named_leaves(parameters), placed, strict=True)
    }
    replicated = NamedSharding(mesh, PartitionSpec())

    def match(name: str, shape: tuple[int, ...]) -> Sharding:
        parts = name.split("/")
        for start in range(len(parts)):  # longest suffix first
            found = known.get("/".join(parts[start:]))
            if found is not None:
                return found[1] if found[0] == shape else replicated
        return replicated

    flat = [match(leaf.name, np.shape(leaf.value)) for leaf in named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), flat)


def _map(function: Any, tree: Any, shardings: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    if isinstance(shardings, Sharding):
        placed: list[Any] = [shardings] * len(leaves)
    else:
        placed = jax.tree.leaves(shardings)
        if len(placed) != len(leaves):
            names = {leaf.name for leaf in named_leaves(tree)} ^ {
                leaf.name for leaf in named_leaves(shardings)
            }
            raise ShardingError(
                f"{len(leaves)} arrays but {len(placed)} shardings; on one side only: {sorted(names)}"
            )
    return jax.tree.unflatten(structure, [function(x, s) for x, s in zip(leaves, placed, strict=True)])


def _place(array: Any, sharding: Sharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _local_block(array: Any, name: str) -> np.ndarray:
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    blocks = {}
    for piece in array.addressable_shards:
        bounds = tuple(index.indices(size)[:2] for index, size in zip(piece.index, array.shape, strict=True))
        blocks.setdefault(bounds, piece)
    starts = [min(bounds[axis][0] for bounds in blocks) for axis in range(array.ndim)]
    stops = [max(bounds[axis][1] for bounds in blocks) for axis in range(array.ndim)]
    local = np.empty([stop - start for start, stop in zip(starts, stops, strict=True)], array.dtype)
    covered = 0
    for bounds, piece in blocks.items():
        window = tuple(slice(a - start, b - start) for (a, b), start in zip(bounds, starts, strict=True))
        local[window] = np.asarray(piece.data)
        covered += piece.data.size
    if covered != local.size:
        raise ShardingError(
            f"{name}: this process holds {covered} elements, scattered in a block of {local.size} of shape"
            f" {local.shape} under {array.sharding}; order the mesh so that a process holds one rectangle"
        )
    return local
