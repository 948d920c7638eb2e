"""The communication of a compiled program: kind, count, bytes and mesh axes of its collectives.

    compiled = jax.jit(step).lower(state, batch).compile()
    print(report(collectives(compiled, mesh)))

Bytes are those of the compiled program: a backend may widen a type (CPU reduces bfloat16 in float32), merge
several collectives, or replace one kind by another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding.errors import ShardingError
from sharding.hlo import Instruction, instructions, num_partitions
from sharding.inspect import size, table


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      kind: all-gather, all-reduce, reduce-scatter, all-to-all, ragged-all-to-all, collective-permute or
        collective-broadcast.
      axes: mesh axes along which its devices differ, in mesh order.
      whole_axes: False if its groups span only part of those axes (of a permute: always True).
      group_size: devices that communicate with one another.
      bytes: payload a device and execution: the gathered result, the operand to be scattered, the buffer
        reduced, exchanged or sent.
      wire_bytes: bytes a device sends in an execution by a ring algorithm: (n-1)/n of the payload, twice
        that for an all-reduce, all of it for a permute or a broadcast. A model, not a measurement.
      executions: times a run of the program performs it, None inside a loop of unknown length.
      across_slices: True where it leaves a TPU slice for the data-centre network. A collective over both
        counts as two: one inside the slices and one across.
      name, source: the instruction, and the jax operation it came from where the compiler kept it.
    """

    kind: str
    axes: tuple[str, ...]
    whole_axes: bool
    group_size: int
    bytes: int
    wire_bytes: int
    executions: int | None
    name: str
    source: str
    across_slices: bool = False


@dataclasses.dataclass(frozen=True)
class Total:
    """Collectives of one kind over the same axes.

    Attributes:
      kind, axes, across_slices: what they share.
      count: instructions in the program.
      executions: performed in one run; a loop of unknown length counts once.
      bytes, wire_bytes: of all executions, a device.
      complete: False if a loop of unknown length is among them, so that the sums are lower bounds.
    """

    kind: str
    axes: tuple[str, ...]
    across_slices: bool
    count: int
    executions: int
    bytes: int
    wire_bytes: int
    complete: bool


def collectives(program: Any, mesh: Mesh | None = None) -> tuple[Collective, ...]:
    """Collectives of a compiled program, in the order of its text.

    Args:
      program: what `jax.jit(f).lower(...).compile()` returns, or the text of its `as_text()`.
      mesh: the mesh the program was compiled for; by default that of its arguments or results.

    Raises:
      ShardingError: no mesh is found, or one of another size than the program's.
    """
    mesh = mesh if mesh is not None else _mesh_of(program)
    text = program if isinstance(program, str) else program.as_text()
    found = instructions(text)
    positions, slices = _positions(mesh, num_partitions(text)) if found else ([], [])
    return tuple(_named(one, mesh, slices if one.across_slices else positions) for one in found)


def totals(found: Iterable[Collective]) -> tuple[Total, ...]:
    """Sums by kind and axes, the most bytes on the wire first."""
    groups: dict[tuple[str, tuple[str, ...], bool], list[Collective]] = {}
    for collective in found:
        key = (collective.kind, collective.axes, collective.across_slices)
        groups.setdefault(key, []).append(collective)
    sums = [
        Total(
            kind,
            axes,
            across_slices,
            count=len(members),
            executions=sum(_at_least_once(c) for c in members),
            bytes=sum(c.bytes * _at_least_once(c) for c in members),
            wire_bytes=sum(c.wire_bytes * _at_least_once(c) for c in members),
            complete=all(c.executions is not None for c in members),
        )
        for (kind, axes, across_slices), members in groups.items()
    ]
    return tuple(sorted(sums, key=lambda total: (-total.wire_bytes, total.kind, total.axes)))


def report(found: Iterable[Collective]) -> str:
    """A table of `totals` as text."""
    rows: list[tuple[str, ...]] = [("kind", "axes", "count", "runs", "payload", "on the wire")]
    for total in totals(found):
        runs = str(total.executions) if total.complete else f">={total.executions}"
        axes = ("+".join(total.axes) or "-") + (" (DCN)" if total.across_slices else "")
        rows.append((total.kind, axes, str(total.count), runs, size(total.bytes), size(total.wire_bytes)))
    return "no collectives" if len(rows) == 1 else "\n".join(table(rows, left_columns=2))


def _at_least_once(collective: Collective) -> int:
    return 1 if collective.executions is None else collective.executions


def _mesh_of(program: Any) -> Mesh:
    if not isinstance(program, str):
        for sharding in jax.tree.leaves((program.input_shardings, program.output_shardings)):
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
                return sharding.mesh
    raise ShardingError("collectives: no argument or result of the program is sharded by a mesh; pass mesh=")


def _positions(mesh: Mesh, partitions: int) -> tuple[list[int], list[int]]:
    """Positions of the program's device ids in the flattened mesh, and the first device of each slice."""
    slice_ids = [getattr(device, "slice_index", None) or 0 for device in mesh.devices.flat]
    slices = [slice_ids.index(slice_id) for slice_id in sorted(set(slice_ids))]
    if partitions == mesh.size:
        return list(range(mesh.size)), slices
    first = [position for position, slice_id in enumerate(slice_ids) if slice_id == min(slice_ids)]
    if partitions == len(first) and partitions * len(slices) == mesh.size:
        return first, slices
    raise ShardingError(
        f"collectives: the program is compiled for {partitions} devices, but mesh {dict(mesh.shape)} has"
        f" {mesh.size}; pass the mesh that the program was compiled for"
    )


def _named(found: Instruction, mesh: Mesh, positions: list[int]) -> Collective:
    """`positions[i]` is where the i-th member that the instruction may name is in the flattened mesh."""
    coordinates = np.stack(np.unravel_index(np.array(positions)[found.groups], mesh.devices.shape))
    # coordinates: [axis, group, member]
    differs = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    axes = tuple(name for name, varies in zip(mesh.axis_names, differs, strict=True) if varies)
    group_size = found.groups.shape[1]
    span = int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))
    is_permute = found.kind == "collective-permute"
    return Collective(
        found.kind,
        axes,
        whole_axes=is_permute or span == group_size,
        group_size=group_size,
        bytes=found.bytes,
        wire_bytes=_wire_bytes(found.kind, found.bytes, group_size),
        executions=found.executions,
        name=found.name,
        source=found.source,
        across_slices=found.across_slices,
    )


def _wire_bytes(kind: str, payload: int, group_size: int) -> int:
    if kind in ("collective-permute", "collective-broadcast"):
        return payload
    passes = 2 if kind == "all-reduce" else 1
    return passes * payload * (group_size - 1) // group_size
