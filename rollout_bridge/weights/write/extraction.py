"""What changed in canonical bits, picked out on the accelerator or on the host.

Nothing here communicates between devices, so a background thread may run it beside the training step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rollout_bridge.quantization import device
from rollout_bridge.weights.write.comparison import (
    class_start,
    compact,
    local_bits,
    mesh_of,
    of_process,
    row_counts,
    rows_of,
)
from rollout_bridge.weights.write.derivation import Bits, shard_data
from rollout_bridge.weights.write.encoder import Patch
from rollout_bridge.weights.write.stacks import ShardBlock, Stack, StackRanks, changes_of

# Elements compared by one program: bounds its temporary memory, and keeps positions within int32.
_CHUNK_ELEMENTS = 1 << 27
# Shards up to this size cross to the host whole, if anything in them changed: no program to compile for them.
_SMALL_ELEMENTS = 1 << 16
# Past this part of a chunk its elements cross as they are, which is then smaller than positions.
_DENSE_FRACTION = 1 / 8
# A buffer is used again for up to this many times fewer changes, instead of compiling for a smaller one.
_SLACK = 8


class Compaction(enum.StrEnum):
    """Where changes are found. `device`: only they are copied to the host. `host`: for CPU, no copies."""

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"


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
                block = ShardBlock.of(self._stacks[key], shard.index)
                for patch in block.full(np.asarray(shard_data(shard))):
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
        before = {shard.device: shard_data(shard) for shard in old.addressable_shards}
        for shard in self._mine(new):
            if wanted(shard.device):
                block = ShardBlock.of(self._stacks[key], shard.index)
                for patch in changes_of(
                    block, np.asarray(before[shard.device]), np.asarray(shard_data(shard))
                ):
                    yield key, patch

    def _compacted(self, bits: Bits, baseline: Bits) -> Iterator[tuple[str, Patch]]:
        """Changes found on the devices; what crosses to the host is proportional to what changed.

        Two rounds, each one program for all devices of this process: how many elements of each row changed;
        then the changes of each chunk of rows, in a buffer of a power of two, kept while it fits.
        """
        old = {key: of_process(baseline[key]) for key in bits}
        new = {key: of_process(bits[key]) for key in bits}
        blocks = {
            key: [ShardBlock.of(self._stacks[key], s.index) for s in bits[key].addressable_shards]
            for key in bits
        }
        rows = {key: blocks[key][0].rows for key in bits}
        counts = jax.device_get(row_counts(old, new, tuple(rows.items())))
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
        blocks: Sequence[ShardBlock],
        old: jax.Array,
        new: jax.Array,
        first: int,
        height: int,
        counts: np.ndarray,
    ) -> Iterator[tuple[str, Patch]]:
        """Changes of rows [first, first + height) of every shard; counts: how many, by shard."""
        size, rows, mesh = height * blocks[0].row_size, blocks[0].rows, mesh_of(old)
        mine = {shard.device for shard in self._mine(array)}
        dense = counts.max() > _DENSE_FRACTION * size
        if dense:
            before, after = (rows_of(part, first, rows=rows, height=height, mesh=mesh) for part in (old, new))
        else:
            slots = self._slots_for(key, height, int(counts.max()), size)
            found = compact(old, new, first, rows=rows, height=height, slots=slots, mesh=mesh)
        for place, shard in enumerate(array.addressable_shards):
            if shard.device not in mine or not counts[place]:
                continue
            if dense:
                patches = changes_of(
                    blocks[place], local_bits(before, place), local_bits(after, place), first_row=first
                )
            else:
                changes, ranks, sizes = found
                positions, olds, news, ranks = (
                    local_bits(part, place)[0, : counts[place]]
                    for part in (changes.positions, changes.old, changes.new, ranks)
                )
                classes = StackRanks(ranks, local_bits(sizes, place)[0], class_start(olds.dtype))
                patches = blocks[place].changes(positions, olds, news, first_row=first, classes=classes)
            for patch in patches:
                yield key, patch

    def _slots_for(self, key: str, height: int, count: int, size: int) -> int:
        kept = self._slots.get((key, height), 0)
        if not count <= kept <= _SLACK * max(count, 1024):
            kept = self._slots[key, height] = device.change_bucket(2 * count, size)
        return kept


def _chunk_rows(rows: int, row_size: int) -> int:
    """The largest divisor of `rows` whose chunk is within the limit, so that all chunks share a program."""
    limit = max(1, min(rows, _CHUNK_ELEMENTS // row_size))
    return next(height for height in range(limit, 0, -1) if rows % height == 0)
