"""Parameters to canonical bits on the accelerator, and what changed in them, picked out there.

`Derivation` may communicate, where a 128-block straddles shards: every process calls it, from the thread that
trains. What `Extractor` runs never does, so a background thread may launch it.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rollout_bridge.architectures.tensors import paths, stacked_shape
from rollout_bridge.quantization import device
from rollout_bridge.quantization.host import NonFiniteError
from rollout_bridge.quantization.plan import BLOCK, Format
from rollout_bridge.weights.encoder import Patch
from rollout_bridge.weights.run import RunInfo
from rollout_bridge.weights.stacks import Block, Classes, Stack, changes_of, scale_key, stacks

# Elements compared by one program: bounds its temporary memory, and keeps positions within int32.
_CHUNK_ELEMENTS = 1 << 27
# Shards up to this size cross to the host whole, if anything in them changed: no program to compile for them.
_SMALL_ELEMENTS = 1 << 16
# Past this part of a chunk its elements cross as they are, which is then smaller than positions.
_DENSE_FRACTION = 1 / 8
# A buffer is used again for up to this many times fewer changes, instead of compiling for a smaller one.
_SLACK = 8

Bits = dict[str, jax.Array]


class Compaction(enum.StrEnum):
    """Where changes are picked out. `device` moves only them to the host; `host` suits CPU: nothing moves."""

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class _Leaf:
    """How one parameter becomes bits. lead: number of stacked axes."""

    path: str
    shape: tuple[int, ...]
    lead: int
    transpose: bool
    format: Format


class Derivation:
    """Parameters -> canonical bits: one program for the whole tree, sharded as the parameters are."""

    def __init__(self, run: RunInfo) -> None:
        self.stacks = stacks(run.sources, run.plan)
        self._leaves = tuple(
            _Leaf(
                path,
                stacked_shape(group),
                len(self.stacks[path].lead),
                group[0].transpose,
                run.plan.formats[group[0].name],
            )
            for path, group in paths(run.sources).items()
        )

    def __call__(self, params: Mapping[str, jax.Array]) -> tuple[Bits, Bits]:
        """(bits by key, by path how many weights of each tensor are not finite). Dispatches and returns.

        Raises ValueError naming a parameter that is missing or has another shape.
        """
        tree = {}
        for leaf in self._leaves:
            array = params.get(leaf.path)
            if array is None or array.shape != leaf.shape:
                found = "none" if array is None else f"shape {array.shape}"
                raise ValueError(
                    f"publisher: parameter {leaf.path}: found {found}, expected shape {leaf.shape}"
                )
            tree[leaf.path] = _compiler_sharded(array)
        out = self._out_shardings(tree)
        return _program(self._leaves, *(tuple(shardings.items()) for shardings in out))(tree)

    def check_finite(self, nonfinite: Bits) -> None:
        """Raises NonFiniteError naming the first tensor with NaN or infinity: it must not reach an engine."""
        for path, counts in jax.device_get(nonfinite).items():
            bad = np.flatnonzero(counts)
            if bad.size:
                raise NonFiniteError(
                    f"{self.stacks[path].names[bad[0]]}: {counts.reshape(-1)[bad[0]]} weights are NaN or "
                    "infinite in BF16, so the version is not published; look for the step that made them"
                )

    def _out_shardings(self, tree: Bits) -> tuple[dict[str, NamedSharding | None], ...]:
        """Shards stay where they are; scales are split only where whole blocks are."""
        bits: dict[str, NamedSharding | None] = {key: None for key in self.stacks}
        nonfinite: dict[str, NamedSharding | None] = {leaf.path: None for leaf in self._leaves}
        for leaf in self._leaves:
            sharding = tree[leaf.path].sharding
            if not isinstance(sharding, NamedSharding):
                continue
            axes = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
            if leaf.transpose:
                axes[-2:] = axes[:-3:-1]
            bits[leaf.path] = NamedSharding(sharding.mesh, PartitionSpec(*axes))
            nonfinite[leaf.path] = NamedSharding(sharding.mesh, PartitionSpec())
            if leaf.format is Format.fp8_block:
                for axis, block in ((-2, BLOCK[0]), (-1, BLOCK[1])):
                    if self.stacks[leaf.path].shape[axis] % (block * _parts(sharding, axes[axis])):
                        axes[axis] = None
                bits[scale_key(leaf.path)] = NamedSharding(sharding.mesh, PartitionSpec(*axes))
        return bits, nonfinite


@functools.lru_cache(maxsize=32)
def _program(
    leaves: tuple[_Leaf, ...],
    bits: tuple[tuple[str, NamedSharding | None], ...],
    nonfinite: tuple[tuple[str, NamedSharding | None], ...],
) -> Callable[[Bits], tuple[Bits, Bits]]:
    """Compiled once a process and layout, however many publishers it sees."""
    return jax.jit(functools.partial(_derive, leaves), out_shardings=(dict(bits), dict(nonfinite)))


def _derive(leaves: tuple[_Leaf, ...], tree: Bits) -> tuple[Bits, Bits]:
    bits, nonfinite = {}, {}
    for leaf in leaves:
        path, array = leaf.path, tree[leaf.path]
        finite = jnp.isfinite(array.astype(jnp.bfloat16))
        nonfinite[path] = jnp.sum(~finite, axis=tuple(range(leaf.lead, array.ndim)), dtype=jnp.int32)
        if leaf.transpose:
            array = jnp.swapaxes(array, -1, -2)
        match leaf.format:
            case Format.fp8_block:
                quantized = device.quantize_block_fp8(array)
                bits[path] = quantized.codes
                bits[scale_key(path)] = lax.bitcast_convert_type(quantized.scale, jnp.uint32)
            case Format.bf16:
                bits[path] = device.float32_to_bfloat16_bits(array)
            case Format.f32:
                bits[path] = lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
    return bits, nonfinite


def _parts(sharding: NamedSharding, axes: str | tuple[str, ...] | None) -> int:
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(sharding.mesh.shape[name] for name in names)


def _data(shard: jax.Shard) -> jax.Array:
    assert shard.data is not None, "addressable shards have data"
    return shard.data


def _compiler_sharded(array: jax.Array) -> jax.Array:
    """The same buffers under a mesh whose axes are all Auto: the programs here leave collectives to XLA."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or all(
        kind == AxisType.Auto for kind in sharding.mesh.axis_types
    ):
        return array
    assert isinstance(sharding.mesh, Mesh), "arrays live on devices"
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    shards = [_data(shard) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, sharding.spec), shards)


def equal(left: Bits, right: Bits) -> bool:
    """Whether two trees of bits are the same."""
    return bool(_equal(left, right))


@jax.jit
def _equal(left: Bits, right: Bits) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(left[key] == right[key]) for key in left]))


def from_host(stack: Stack, like: jax.Array, tensor: Callable[[str], np.ndarray]) -> jax.Array:
    """The stack with the sharding of `like`, each device given its part of the tensors."""
    return jax.make_array_from_callback(
        stack.shape, like.sharding, lambda index: Block.of(stack, index or ()).read(tensor)
    )


class Extractor:
    """Patches of the shards this process publishes: one replica of each, on `devices` or any of its own."""

    def __init__(
        self, by_key: Mapping[str, Stack], *, devices: Sequence[Any] | None, compaction: Compaction
    ) -> None:
        self._stacks = by_key
        self._devices = None if devices is None else frozenset(devices)
        self._compaction = compaction
        self._slots: dict[tuple[str, int], int] = {}

    def full(self, bits: Bits) -> Iterator[tuple[str, Patch]]:
        """(key, patch) for every tensor, all its bits."""
        for key, array in bits.items():
            for shard in self._mine(array):
                block = Block.of(self._stacks[key], shard.index)
                for patch in block.full(np.asarray(_data(shard))):
                    yield key, patch

    def changes(self, bits: Bits, baseline: Bits) -> Iterator[tuple[str, Patch]]:
        """(key, patch) for every tensor that differs from `baseline`, which is sharded as `bits`."""
        first = next(iter(bits.values())).addressable_shards[0].device
        if self._compaction is Compaction.DEVICE or (
            self._compaction is Compaction.AUTO and first.platform != "cpu"
        ):
            yield from self._compacted(bits, baseline)
            return
        for key, array in bits.items():
            yield from self._compared(key, array, baseline[key], lambda place: True)

    def _mine(self, array: jax.Array) -> Iterator[jax.Shard]:
        for shard in array.addressable_shards:
            if shard.replica_id == 0 and (self._devices is None or shard.device in self._devices):
                yield shard

    def _compared(
        self, key: str, new: jax.Array, old: jax.Array, wanted: Callable[[Any], bool]
    ) -> Iterator[tuple[str, Patch]]:
        """Changes found on the host, of shards on the `wanted` devices."""
        before = {shard.device: _data(shard) for shard in old.addressable_shards}
        for shard in self._mine(new):
            if wanted(shard.device):
                block = Block.of(self._stacks[key], shard.index)
                for patch in changes_of(block, np.asarray(before[shard.device]), np.asarray(_data(shard))):
                    yield key, patch

    def _compacted(self, bits: Bits, baseline: Bits) -> Iterator[tuple[str, Patch]]:
        """Changes found on the devices; what crosses to the host is proportional to what changed.

        Two rounds, each one program for all devices of this process: how many elements of each row changed;
        then the changes of each chunk of rows, in a buffer of a power of two, kept while it fits.
        """
        old = {key: _of_process(baseline[key]) for key in bits}
        new = {key: _of_process(bits[key]) for key in bits}
        blocks = {
            key: [Block.of(self._stacks[key], s.index) for s in bits[key].addressable_shards] for key in bits
        }
        rows = {key: blocks[key][0].rows for key in bits}
        counts = jax.device_get(_row_counts(old, new, tuple(rows.items())))
        for key in bits:
            row_size = blocks[key][0].row_size
            if rows[key] * row_size <= _SMALL_ELEMENTS:
                changed = {
                    shard.device: bool(counts[key][place].any())
                    for place, shard in enumerate(bits[key].addressable_shards)
                }
                yield from self._compared(key, bits[key], baseline[key], changed.__getitem__)
                continue
            height = _chunk_rows(rows[key], row_size)
            for first in range(0, rows[key], height):
                here = counts[key][:, first : first + height].sum(axis=1)
                if here.any():
                    yield from self._chunk(
                        key, bits[key], blocks[key], old[key], new[key], first, height, here
                    )

    def _chunk(
        self,
        key: str,
        array: jax.Array,
        blocks: Sequence[Block],
        old: jax.Array,
        new: jax.Array,
        first: int,
        height: int,
        counts: np.ndarray,
    ) -> Iterator[tuple[str, Patch]]:
        """Changes of rows [first, first + height) of every shard; counts: how many, by shard."""
        size, rows = height * blocks[0].row_size, blocks[0].rows
        mine = {shard.device for shard in self._mine(array)}
        dense = counts.max() > _DENSE_FRACTION * size
        if dense:
            before, after = (_rows_of(part, first, rows=rows, height=height) for part in (old, new))
        else:
            slots = self._slots_for(key, height, int(counts.max()), size)
            found = _compact(old, new, first, rows=rows, height=height, slots=slots)
        for place, shard in enumerate(array.addressable_shards):
            if shard.device not in mine or not counts[place]:
                continue
            if dense:
                patches = changes_of(
                    blocks[place], _local(before, place), _local(after, place), first_row=first
                )
            else:
                changes, ranks, sizes = found
                positions, olds, news, ranks = (
                    _local(part, place)[0, : counts[place]]
                    for part in (changes.positions, changes.old, changes.new, ranks)
                )
                classes = Classes(ranks, _local(sizes, place)[0], _class_start(olds.dtype))
                patches = blocks[place].changes(positions, olds, news, first_row=first, classes=classes)
            for patch in patches:
                yield key, patch

    def _slots_for(self, key: str, height: int, count: int, size: int) -> int:
        kept = self._slots.get((key, height), 0)
        if not count <= kept <= _SLACK * max(count, 1024):
            kept = self._slots[key, height] = device.change_bucket(2 * count, size)
        return kept


def _class_start(bits: np.dtype) -> int:
    """The exponent field at which the codec's classes start: the last is 0.5 to 1 for BF16 and float32."""
    return 0 if bits.itemsize == 1 else 112


def _chunk_rows(rows: int, row_size: int) -> int:
    """The largest divisor of `rows` whose chunk is within the limit, so that all chunks share a program."""
    limit = max(1, min(rows, _CHUNK_ELEMENTS // row_size))
    return next(height for height in range(limit, 0, -1) if rows % height == 0)


def _of_process(array: jax.Array) -> jax.Array:
    """The shards of this process side by side along the first axis, without moving them."""
    shards = [_data(shard) for shard in array.addressable_shards]
    mesh = Mesh(np.array([shard.device for shard in array.addressable_shards]), ("device",))
    shape = (len(shards) * shards[0].shape[0], *shards[0].shape[1:])
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _local(array: jax.Array, place: int) -> np.ndarray:
    return np.asarray(_data(array.addressable_shards[place]))


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


def _row_counts(old: Bits, new: Bits, rows: tuple[tuple[str, int], ...]) -> dict[str, jax.Array]:
    """int32[devices, rows] by key. Arrays on different devices are counted by different programs."""
    by_mesh: dict[Mesh, list[tuple[str, int]]] = {}
    for key, count in rows:
        by_mesh.setdefault(_mesh(old[key]), []).append((key, count))
    result = {}
    for mesh, group in by_mesh.items():
        keys = [key for key, _ in group]
        result |= _counts(
            {key: old[key] for key in keys}, {key: new[key] for key in keys}, rows=tuple(group), mesh=mesh
        )
    return result


def _mesh(array: jax.Array) -> Mesh:
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


def _rows_of(array: jax.Array, first: int, *, rows: int, height: int) -> jax.Array:
    return _slice(array, first, rows=rows, height=height, mesh=_mesh(array))


@functools.partial(jax.jit, static_argnames=("rows", "height", "mesh"))
def _slice(array: jax.Array, first: jax.Array, *, rows: int, height: int, mesh: Mesh) -> jax.Array:
    def part(array: jax.Array, first: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array.reshape(rows, -1), first, height)

    return _on_each_device(part, mesh, array, first=first)


def _compact(
    old: jax.Array, new: jax.Array, first: int, *, rows: int, height: int, slots: int
) -> tuple[device.Changes, jax.Array, jax.Array]:
    return _diff(old, new, first, rows=rows, height=height, slots=slots, mesh=_mesh(old))


@functools.partial(jax.jit, static_argnames=("rows", "height", "slots", "mesh"))
def _diff(
    old: jax.Array, new: jax.Array, first: jax.Array, *, rows: int, height: int, slots: int, mesh: Mesh
) -> tuple[device.Changes, jax.Array, jax.Array]:
    def compact(old: jax.Array, new: jax.Array, first: jax.Array) -> tuple:
        old, new = (
            lax.dynamic_slice_in_dim(array.reshape(rows, 1, -1), first, height) for array in (old, new)
        )
        changes = device.diff_compact(new, old, slots)
        return changes, *device.class_ranks(old, changes.positions, start=_class_start(old.dtype))

    return _on_each_device(compact, mesh, old, new, first=first)
