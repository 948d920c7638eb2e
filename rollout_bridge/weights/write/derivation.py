"""Parameters to canonical bits on the accelerator, sharded as the parameters are.

A derivation may communicate, where a 128-block straddles shards: every process calls it, from the thread that
trains.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rollout_bridge.architectures.tensors import paths, stacked_shape
from rollout_bridge.quantization import device
from rollout_bridge.quantization.host import NonFiniteError
from rollout_bridge.quantization.plan import BLOCK, Format
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.write.stacks import ShardBlock, Stack, scale_key, stacks

Bits = dict[str, jax.Array]


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


def shard_data(shard: jax.Shard) -> jax.Array:
    """The bits of an addressable shard."""
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
    shards = [shard_data(shard) for shard in array.addressable_shards]
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
        stack.shape, like.sharding, lambda index: ShardBlock.of(stack, index or ()).read(tensor)
    )
