"""The trainer's side of the weight chain: quantise on the accelerator, diff there, publish only what changed.

Invariants:
- parameters are read by programs dispatched before `publish` returns, so the next step may donate them;
  everything slower happens on a background thread, one publication at a time;
- the baseline is what the head decodes to, bit for bit, and moves only when the new manifest is durable;
- a trainer that another one has superseded moves nothing any more: `weights/latest` fences every commit;
- the background thread launches programs of single devices only, so it cannot interleave collectives.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rollout_bridge.names import TensorSource
from rollout_bridge.names.base import paths, stacked_shape
from rollout_bridge.quantization import device
from rollout_bridge.quantization.host import NonFiniteError
from rollout_bridge.quantization.plan import BLOCK, Format, QuantizationPlan
from rollout_bridge.store import Store
from rollout_bridge.weights import commit
from rollout_bridge.weights.commit import Superseded
from rollout_bridge.weights.encoder import Patch
from rollout_bridge.weights.manifest import Kind, Latest, Manifest, Stats
from rollout_bridge.weights.run import RunInfo
from rollout_bridge.weights.stacks import Block, Stack, changes_of, scale_key, stacks
from rollout_bridge.weights.writer import ChainWriter, WriterSettings

__all__ = ["Compaction", "Publication", "Publisher", "Superseded", "WriterSettings"]

logger = logging.getLogger(__name__)

# Elements compared by one program: bounds its temporary memory, and keeps positions within int32.
_CHUNK_ELEMENTS = 1 << 27
# Past this part of a chunk its elements cross to the host as they are, which is then smaller than positions.
_DENSE_FRACTION = 1 / 8

Bits = dict[str, jax.Array]


class Compaction(enum.StrEnum):
    """Where changes are picked out. `device` moves only them to the host; `host` suits CPU: nothing moves."""

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"


class Publication:
    """One version on its way to the store."""

    def __init__(self, version: int, step: int, future: Future[Manifest]) -> None:
        self.version = version
        self.step = step
        self._future = future

    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Manifest:
        """The committed manifest. Raises what went wrong, `Superseded` included, or TimeoutError."""
        return self._future.result(timeout)

    def stats(self, timeout: float | None = None) -> Stats:
        """Sizes of the committed version."""
        return self.result(timeout).stats


class Publisher:
    """Publishes the parameters of one run. `take_over` (or `join`) comes before the first `publish`.

    run: as `create_or_join` returned it. full_every, settings: how the chain is written.
    sources, plan: those of the run, checked if given.
    devices: whose shards this process writes; its own by default. In a job of several processes all call the
    same methods in the same order.
    """

    def __init__(
        self,
        store: Store,
        *,
        run: RunInfo,
        full_every: int,
        sources: Sequence[TensorSource] | None = None,
        plan: QuantizationPlan | None = None,
        settings: WriterSettings | None = None,
        devices: Sequence[Any] | None = None,
        compaction: Compaction = Compaction.AUTO,
    ) -> None:
        if tuple(sources or run.sources) != run.sources or (plan or run.plan) != run.plan:
            raise ValueError("publisher: sources or plan are not those of the run; build the run from them")
        self._writer = ChainWriter(store, run, settings or WriterSettings(), full_every=full_every)
        self._derivation = _Derivation(run)
        self._stacks = self._derivation.stacks
        self._devices = None if devices is None else frozenset(devices)
        self._compaction = compaction
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._flight: Publication | None = None
        self._baseline: Bits | None = None
        self._attempts = 0
        self._failed: BaseException | None = None

    @property
    def head(self) -> Latest:
        """The head this publisher goes on from; version 0 if nothing is published yet."""
        return self._writer.head

    def take_over(self) -> Latest:
        """Takes the run from whoever had it and rebuilds the head from the chain. Process 0 only.

        The result (version 0: nothing published yet) goes to the other processes, for `join`.
        Raises `Superseded` if another trainer takes over at the same moment.
        """
        owner = f"{socket.gethostname()} pid {os.getpid()}"
        self.join(commit.take_over(self._writer.store, owner=owner))
        return self.head

    def join(self, head: Latest) -> None:
        """Goes on from the head that process 0 took over."""
        self._writer.join(head)

    def publish(
        self, params: Mapping[str, jax.Array], *, step: int, update_rms: float | None = None
    ) -> Publication:
        """Publishes `params` (path -> stacked float32 or bfloat16 array) as the version after the head.

        Returns when all reads of `params` are dispatched. Waits for the publication before, raises its error.
        step: optimizer steps the parameters have seen. update_rms: of the master weights since the last
        publication, kept in the manifest.
        """
        if self._flight is not None:
            flight, self._flight = self._flight, None
            flight.result()
        if self._failed is not None:
            raise RuntimeError("publisher: a publication failed; restart the trainer") from self._failed
        head = self.head
        bits, nonfinite = self._derivation(params)
        self._attempts += 1
        attempt = f"{step}-{self._attempts}"
        future = self._executor.submit(self._publish, bits, nonfinite, step, update_rms, attempt)
        self._flight = Publication(head.version + 1, step, future)
        return self._flight

    def verify_head(self, params: Mapping[str, jax.Array]) -> bool:
        """Whether `params` quantise to exactly what the head decodes to: the redo reproduced it.

        Raises RuntimeError if there is no head, or its chain was too broken to rebuild.
        """
        if self._flight is not None:
            self._flight.result()
        bits, _ = self._derivation(params)
        baseline = self._aligned_baseline(bits)
        if baseline is None:
            raise RuntimeError(
                f"publisher: nothing to compare with at version {self.head.version}: nothing is published, "
                "or its chain is broken (the log says where), and the next version will be a full one"
            )
        return bool(_equal(bits, baseline))

    def close(self, timeout: float | None = None) -> None:
        """Waits for the publication in flight and raises its error; then stops the thread."""
        try:
            if self._flight is not None:
                flight, self._flight = self._flight, None
                flight.result(timeout)
        finally:
            self._executor.shutdown(wait=False)
            self._writer.close()

    def _publish(
        self,
        bits: Bits,
        nonfinite: Bits,
        step: int,
        update_rms: float | None,
        attempt: str,
    ) -> Manifest:
        started = time.monotonic()
        try:
            self._derivation.check_finite(nonfinite)
            baseline = self._aligned_baseline(bits)
            kind = self._writer.begin(attempt, can_delta=baseline is not None)
            if kind is Kind.FULL or baseline is None:
                patches = list(self._full(bits))
            else:
                patches = list(self._changes(bits, baseline))
            part = self._writer.write(patches, kind, attempt)

            def durable() -> None:
                self._baseline = bits

            manifest = self._writer.commit(
                part, kind, patches=patches, step=step, update_rms=update_rms, durable=durable
            )
        except BaseException as error:
            # Alone, a failure before the manifest leaves nothing behind and the next step may try again;
            # among several processes some may have moved on.
            if self._writer.settings.processes > 1 or isinstance(error, Superseded):
                self._failed = error
            raise
        logger.info(
            "version %d (%s) of step %d: %d bytes, %.2f s",
            manifest.version,
            kind.value,
            step,
            manifest.stats.delta_bytes,
            time.monotonic() - started,
        )
        return manifest

    def _aligned_baseline(self, bits: Bits) -> Bits | None:
        """The baseline, sharded as `bits`: from the device, or from the rebuilt head."""
        replayed = self._writer.replayed
        if self._baseline is None and replayed is not None:
            self._baseline = {
                key: _from_host(self._stacks[key], array, replayed.tensor) for key, array in bits.items()
            }
            self._writer.rebase(list(self._full(self._baseline)))
            self._writer.replayed = None
        if self._baseline is not None:
            for key, array in bits.items():
                if self._baseline[key].sharding != array.sharding:
                    self._baseline[key] = jax.device_put(self._baseline[key], array.sharding)
        return self._baseline

    def _shards(self, array: jax.Array) -> Iterator[jax.Shard]:
        """One of the replicas of every shard, by the process that holds it."""
        for shard in array.addressable_shards:
            if shard.replica_id == 0 and (self._devices is None or shard.device in self._devices):
                yield shard

    def _full(self, bits: Bits) -> Iterator[tuple[str, Patch]]:
        for key, array in bits.items():
            for shard in self._shards(array):
                block = Block.of(self._stacks[key], shard.index)
                for patch in block.full(np.asarray(_data(shard))):
                    yield key, patch

    def _changes(self, bits: Bits, baseline: Bits) -> Iterator[tuple[str, Patch]]:
        by_device: dict[Any, list[_Pair]] = {}
        for key, array in bits.items():
            old = {shard.device: _data(shard) for shard in baseline[key].addressable_shards}
            for shard in self._shards(array):
                block = Block.of(self._stacks[key], shard.index)
                pair = _Pair(key, block, old[shard.device], _data(shard))
                by_device.setdefault(shard.device, []).append(pair)
        for place, pairs in by_device.items():
            host = self._compaction is Compaction.AUTO and place.platform == "cpu"
            if host or self._compaction is Compaction.HOST:
                for pair in pairs:
                    for patch in changes_of(pair.block, np.asarray(pair.old), np.asarray(pair.new)):
                        yield pair.key, patch
            else:
                yield from _compacted(pairs)


class _Derivation:
    """Parameters -> canonical bits: one program for the whole tree, sharded as the parameters are."""

    def __init__(self, run: RunInfo) -> None:
        groups = paths(run.sources)
        self.stacks = stacks(run.sources, run.plan)
        self._shapes = {path: stacked_shape(group) for path, group in groups.items()}
        self._transpose = {path: group[0].transpose for path, group in groups.items()}
        self._formats = {path: run.plan.formats[group[0].name] for path, group in groups.items()}
        self._programs: dict[tuple, Callable[[Bits], tuple[Bits, Bits]]] = {}

    def __call__(self, params: Mapping[str, jax.Array]) -> tuple[Bits, Bits]:
        """(bits by key, by path how many weights of each tensor are not finite). Dispatches and returns.

        Raises ValueError naming a parameter that is missing or has another shape.
        """
        tree = {}
        for path, shape in self._shapes.items():
            if path not in params or params[path].shape != shape:
                found = f"shape {params[path].shape}" if path in params else "none"
                raise ValueError(f"publisher: parameter {path}: found {found}, expected shape {shape}")
            tree[path] = _compiler_sharded(params[path])
        signature = tuple((path, array.sharding, array.dtype) for path, array in tree.items())
        if signature not in self._programs:
            self._programs[signature] = jax.jit(self._derive, out_shardings=self._out_shardings(tree))
        return self._programs[signature](tree)

    def check_finite(self, nonfinite: Bits) -> None:
        """Raises NonFiniteError naming the first tensor with NaN or infinity: it must not reach an engine."""
        for path, counts in jax.device_get(nonfinite).items():
            bad = np.flatnonzero(counts)
            if bad.size:
                raise NonFiniteError(
                    f"{self.stacks[path].names[bad[0]]}: {counts.reshape(-1)[bad[0]]} weights are NaN or "
                    "infinite in BF16, so the version is not published; look for the step that made them"
                )

    def _derive(self, tree: Bits) -> tuple[Bits, Bits]:
        bits, nonfinite = {}, {}
        for path, array in tree.items():
            inner = tuple(range(len(self.stacks[path].lead), array.ndim))
            finite = jnp.isfinite(array.astype(jnp.bfloat16))
            nonfinite[path] = jnp.sum(~finite, axis=inner, dtype=jnp.int32)
            if self._transpose[path]:
                array = jnp.swapaxes(array, -1, -2)
            match self._formats[path]:
                case Format.fp8_block:
                    quantized = device.quantize_block_fp8(array)
                    bits[path] = quantized.codes
                    bits[scale_key(path)] = lax.bitcast_convert_type(quantized.scale, jnp.uint32)
                case Format.bf16:
                    bits[path] = device.float32_to_bfloat16_bits(array)
                case Format.f32:
                    bits[path] = lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
        return bits, nonfinite

    def _out_shardings(self, tree: Bits) -> tuple[dict[str, NamedSharding | None], ...]:
        """Shards stay where they are; scales are split only where whole blocks are."""
        bits: dict[str, NamedSharding | None] = {}
        nonfinite: dict[str, NamedSharding | None] = {}
        for path, array in tree.items():
            bits[path] = nonfinite[path] = None
            sharding = array.sharding
            if self._formats[path] is Format.fp8_block:
                bits[scale_key(path)] = None
            if not isinstance(sharding, NamedSharding):
                continue
            axes = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
            if self._transpose[path]:
                axes[-2:] = axes[:-3:-1]
            bits[path] = NamedSharding(sharding.mesh, PartitionSpec(*axes))
            nonfinite[path] = NamedSharding(sharding.mesh, PartitionSpec())
            if self._formats[path] is Format.fp8_block:
                for axis, block in ((-2, BLOCK[0]), (-1, BLOCK[1])):
                    if self.stacks[path].shape[axis] % (block * _parts(sharding, axes[axis])):
                        axes[axis] = None
                bits[scale_key(path)] = NamedSharding(sharding.mesh, PartitionSpec(*axes))
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


@dataclass(frozen=True)
class _Pair:
    """The same block before and after, both on one device."""

    key: str
    block: Block
    old: jax.Array
    new: jax.Array


def _compacted(pairs: Sequence[_Pair]) -> Iterator[tuple[str, Patch]]:
    """Patches of one device's blocks; what crosses to the host is proportional to what changed.

    Two rounds: how many elements of each row changed, then the changes of each chunk of rows, into a buffer
    of the next power of two: a few programs a shape, whatever changes.
    """
    rows = tuple(pair.block.rows for pair in pairs)
    counts = jax.device_get(_row_counts([pair.old for pair in pairs], [pair.new for pair in pairs], rows))
    found = []
    for pair, of_rows in zip(pairs, counts, strict=True):
        height = max(1, _CHUNK_ELEMENTS // pair.block.row_size)
        for first in range(0, pair.block.rows, height):
            here = of_rows[first : first + height]
            count, size = int(here.sum()), here.size * pair.block.row_size
            if count > _DENSE_FRACTION * size:
                chunk = _take(pair.old, pair.new, first, rows=pair.block.rows, height=here.size)
            elif count:
                slots = device.change_bucket(count, size)
                chunk = _compact(
                    pair.old, pair.new, first, rows=pair.block.rows, height=here.size, slots=slots
                )
            else:
                continue
            found.append((pair, first, count, chunk))
    for pair, first, count, chunk in found:
        match jax.device_get(chunk):
            case device.Changes(positions=positions, old=old, new=new):
                patches = pair.block.changes(positions[:count], old[:count], new[:count], first_row=first)
            case old, new:
                patches = changes_of(pair.block, old, new, first_row=first)
        for patch in patches:
            yield pair.key, patch


@functools.partial(jax.jit, static_argnames="rows")
def _row_counts(old: list[jax.Array], new: list[jax.Array], rows: tuple[int, ...]) -> list[jax.Array]:
    return [
        jnp.sum((a != b).reshape(count, -1), axis=1, dtype=jnp.int32)
        for a, b, count in zip(old, new, rows, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("rows", "height"))
def _take(
    old: jax.Array, new: jax.Array, first: int, *, rows: int, height: int
) -> tuple[jax.Array, jax.Array]:
    old, new = (lax.dynamic_slice_in_dim(array.reshape(rows, 1, -1), first, height) for array in (old, new))
    return old, new


@functools.partial(jax.jit, static_argnames=("rows", "height", "slots"))
def _compact(
    old: jax.Array, new: jax.Array, first: int, *, rows: int, height: int, slots: int
) -> device.Changes:
    old, new = _take(old, new, first, rows=rows, height=height)
    return device.diff_compact(new, old, slots)


@jax.jit
def _equal(left: Bits, right: Bits) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(left[key] == right[key]) for key in left]))


def _from_host(stack: Stack, like: jax.Array, tensor: Callable[[str], np.ndarray]) -> jax.Array:
    """The stack with the sharding of `like`, each device given its part of the tensors."""
    return jax.make_array_from_callback(
        stack.shape, like.sharding, lambda index: Block.of(stack, index or ()).read(tensor)
    )
