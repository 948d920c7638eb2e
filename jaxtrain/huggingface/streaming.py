"""Reads a Hugging Face directory onto a mesh, tensor by tensor.

Parameters are stacked over layers and experts and sharded over the devices. One small program a parameter
fills each shard in place: every step reads the rows that the local devices need of one tensor (one for each
group of experts, where experts are sharded), sends them, and writes them. Transposition and the change of
dtype happen on the device. The host holds the tensors of one step at a time, and a process reads only the
rows of its devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.huggingface.checkpoint import HuggingFaceCheckpoint
from jaxtrain.huggingface.errors import HuggingFaceError
from rollout_bridge.architectures.tensors import TensorSource, leading_shape, paths

log = logging.getLogger(__name__)

Bounds = tuple[int, int]


def load_parameters(
    checkpoint: HuggingFaceCheckpoint,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    shardings: Mapping[str, NamedSharding],
) -> dict[str, jax.Array]:
    """The parameters of `shapes`, each in its dtype and on its shards. All processes of the mesh call it.

    Raises `HuggingFaceError` if a weight is not finite, naming the parameters; `TruncatedError` if a file is
    shorter than when it was checked.
    """
    groups = paths(checkpoint.sources)
    if unknown := shapes.keys() - groups.keys():
        raise HuggingFaceError(
            checkpoint.directory, [f"{path}: the model has it, its tensor names do not" for path in unknown]
        )
    params, bad_pieces = {}, {}
    for path, shape in shapes.items():
        params[path], bad_pieces[path] = _fill(checkpoint, groups[path], shape, shardings[path])
    if bad := sorted(path for path, value in jax.device_get(_any(bad_pieces)).items() if value):
        raise HuggingFaceError(
            checkpoint.directory, [f"{path}: holds NaN or infinity; download it again" for path in bad]
        )
    log.info("read %d tensors from %s", len(checkpoint.sources), checkpoint.directory)
    return params


def _fill(
    checkpoint: HuggingFaceCheckpoint,
    group: tuple[TensorSource, ...],
    shape: jax.ShapeDtypeStruct,
    sharding: NamedSharding,
) -> tuple[jax.Array, jax.Array]:
    """One stacked parameter, and whether each device saw a number that is not finite (bool [devices]).

    A step writes position `local` of the leading axes of every shard at once.
    """
    lead = len(leading_shape(group))
    shard_lead = sharding.shard_shape(shape.shape)[:lead]
    blocks = tuple(whole // part for whole, part in zip(shape.shape, shard_lead, strict=False))
    spec = (*sharding.spec, *([None] * (len(shape.shape) - len(sharding.spec))))
    trailing = list(spec[lead:])
    if group[0].transpose:
        trailing[-2:] = trailing[:-3:-1]
    piece_sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec[:lead], *trailing))
    piece_shape = (*blocks, *group[0].shape)
    by_index = {source.index: source.name for source in group}
    write = _writer(sharding, piece_sharding, lead, group[0].transpose)

    buffer = _zeros(shape.shape, shape.dtype, sharding)
    bad = _zeros((sharding.mesh.size,), jnp.bool_, NamedSharding(sharding.mesh, _each_device(sharding)))
    for local in np.ndindex(*shard_lead):
        origin = tuple(map(int, local))

        def name_of(block: tuple[int, ...], origin: tuple[int, ...] = origin) -> str:
            return by_index[tuple(b * n + i for b, n, i in zip(block, shard_lead, origin, strict=True))]

        piece = _piece(checkpoint, name_of, piece_shape, piece_sharding, lead)
        buffer, bad = write(buffer, bad, piece, np.asarray(local, np.int32))
        jax.block_until_ready(buffer)  # then the host's copy of the piece can be freed
    return buffer, bad


def _piece(
    checkpoint: HuggingFaceCheckpoint,
    name_of: Callable[[tuple[int, ...]], str],
    shape: tuple[int, ...],
    sharding: NamedSharding,
    lead: int,
) -> jax.Array:
    """The tensors of one step as one array, [blocks of the leading axes..., as in the file...]."""
    rows: dict[tuple[str, Bounds], np.ndarray] = {}
    on_device = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # of an addressable device
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        name = name_of(tuple(start for start, _ in bounds[:lead]))
        wanted = bounds[lead:]
        key = (name, wanted[0])
        if key not in rows:
            rows[key] = checkpoint.rows(name, *wanted[0])
        part = rows[key][(slice(None), *(slice(*bound) for bound in wanted[1:]))]
        part = np.ascontiguousarray(part).reshape((1,) * lead + part.shape)
        on_device.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, on_device)


@lru_cache(maxsize=256)
def _writer(
    sharding: NamedSharding, piece_sharding: NamedSharding, lead: int, transpose: bool
) -> Callable[[jax.Array, jax.Array, jax.Array, np.ndarray], tuple[jax.Array, jax.Array]]:
    """Writes a piece into each shard at a local position, and notes whether it is finite.

    Communicates nothing; the buffers are donated.
    """

    def write(
        buffer: jax.Array, bad: jax.Array, piece: jax.Array, local: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        bad |= ~jnp.isfinite(piece).all()
        piece = piece.swapaxes(-1, -2) if transpose else piece
        start = (*(local[axis] for axis in range(lead)), *([0] * (buffer.ndim - lead)))
        return jax.lax.dynamic_update_slice(buffer, piece.astype(buffer.dtype), start), bad

    mapped = jax.shard_map(
        write,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, _each_device(sharding), piece_sharding.spec, PartitionSpec()),
        out_specs=(sharding.spec, _each_device(sharding)),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> jax.Array:
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(shape, dtype)


def _each_device(sharding: NamedSharding) -> PartitionSpec:
    """Partition of an array with one element a device."""
    return PartitionSpec(sharding.mesh.axis_names)


@jax.jit
def _any(flags: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: value.any() for path, value in flags.items()}
