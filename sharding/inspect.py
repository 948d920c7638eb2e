"""A table of a tree's shardings, checks of them, and mesh axes that shard nothing."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from sharding.errors import ShardingError, UnusedAxisWarning
from sharding.leaves import named_leaves

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class LeafRow:
    """One array.

    Attributes:
      name: `/`-joined path.
      shape: global shape.
      dtype: its name.
      spec: partition spec as text, "host" for an array that is on no device.
      shard_shape: shape on one device.
      bytes: of the whole array.
      bytes_per_device: of one shard.
      waste_per_device: bytes_per_device beyond an even split over all devices of the sharding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    shard_shape: tuple[int, ...]
    bytes: int
    bytes_per_device: int
    waste_per_device: int


@dataclasses.dataclass(frozen=True)
class Description:
    """Rows of `describe`, their totals, and the mesh axes above one that no row uses. Prints as a table."""

    rows: tuple[LeafRow, ...]
    mesh_shape: dict[str, int]
    unused_axes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tree, each array counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the tree on one device."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def waste_per_device(self) -> int:
        """Bytes on one device that an even split of every array would not need."""
        return sum(row.waste_per_device for row in self.rows)

    def __str__(self) -> str:
        header = ("leaf", "shape", "dtype", "spec", "per device", "bytes/device", "waste/device")
        cells = [
            (
                r.name,
                _dims(r.shape),
                r.dtype,
                r.spec,
                _dims(r.shard_shape),
                size(r.bytes_per_device),
                size(r.waste_per_device),
            )
            for r in self.rows
        ]
        total = ("total", "", "", "", "", size(self.bytes_per_device), size(self.waste_per_device))
        lines = table([header, *cells, total], left_columns=5)
        mesh = " ".join(f"{name}={count}" for name, count in self.mesh_shape.items())
        lines.append(f"mesh: {mesh or 'none'}; {len(self.rows)} arrays, {size(self.bytes)} in all")
        lines += [_unused_text(axis, self.mesh_shape[axis]) for axis in self.unused_axes]
        return "\n".join(lines)


def describe(tree: Any, shardings: Any = None) -> Description:
    """Describe how every leaf is sharded; `print(describe(params))` shows the table.

    Args:
      tree: arrays or ShapeDtypeStructs, in any tree, boxed or not.
      shardings: one sharding or a tree of them, for leaves that carry none; by default each leaf's own.

    Warns:
      UnusedAxisWarning: for each mesh axis larger than one that shards no leaf.
    """
    pairs = _with_shardings(tree, shardings)
    rows = tuple(_row(name, value, sharding) for name, value, sharding in pairs)
    mesh_shape, used = _axes([sharding for _, _, sharding in pairs])
    unused = tuple(axis for axis, count in mesh_shape.items() if count > 1 and axis not in used)
    for axis in unused:
        warnings.warn(_unused_text(axis, mesh_shape[axis]), UnusedAxisWarning, stacklevel=2)
    return Description(rows, mesh_shape, unused)


def assert_sharded(tree: Any, shardings: Any) -> None:
    """Check that every array of `tree` is sharded as `shardings` (one, or a tree of them).

    Raises ShardingError with a line for each array that does not: found, expected.
    """
    errors = []
    for name, value, expected in _with_shardings(tree, shardings):
        found = getattr(value, "sharding", None)
        shape = np.shape(value)
        if found is None:
            errors.append(f"{name}: on no device, expected {_spec(expected)}")
        elif expected is not None and not found.is_equivalent_to(expected, len(shape)):
            errors.append(f"{name}: shape {shape} is sharded as {_spec(found)}, expected {_spec(expected)}")
    if errors:
        raise ShardingError(
            "\n".join(errors) + "\nplace the tree with sharding.tree.shard or pass out_shardings to jit"
        )


def assert_waste_below(tree: Any, limit_bytes: int) -> None:
    """Check that no array wastes more than `limit_bytes` of a device by replication.

    Raises ShardingError naming each that does, its spec and its bytes.
    """
    rows = [_row(name, value, sharding) for name, value, sharding in _with_shardings(tree, None)]
    errors = [
        f"{row.name}: {row.spec} of shape {row.shape} wastes {size(row.waste_per_device)} a device by"
        " replication"
        for row in rows
        if row.waste_per_device > limit_bytes
    ]
    if errors:
        raise ShardingError(
            "\n".join(errors) + f"\nlimit {size(limit_bytes)}; shard these over more mesh axes"
        )


def size(count: float) -> str:
    """Bytes as text: 1536 -> `1.5 KiB`."""
    power = 0 if count < 1024 else min(int(math.log(count, 1024)), len(_UNITS) - 1)
    return f"{count / 1024**power:.4g} {_UNITS[power]}"


def table(rows: list[tuple[str, ...]], *, left_columns: int) -> list[str]:
    """Lines of a table with a header row; the first `left_columns` columns are left-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column < left_columns else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _with_shardings(tree: Any, shardings: Any) -> list[tuple[str, Any, Sharding | None]]:
    leaves = named_leaves(tree)
    if shardings is None:
        return [(leaf.name, leaf.value, getattr(leaf.value, "sharding", None)) for leaf in leaves]
    if isinstance(shardings, Sharding):
        return [(leaf.name, leaf.value, shardings) for leaf in leaves]
    placed = jax.tree.leaves(shardings)
    if len(placed) != len(leaves):
        raise ShardingError(f"{len(leaves)} arrays but {len(placed)} shardings; pass trees of one structure")
    return [(leaf.name, leaf.value, sharding) for leaf, sharding in zip(leaves, placed, strict=True)]


def _row(name: str, value: Any, sharding: Sharding | None) -> LeafRow:
    shape = tuple(np.shape(value))
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    itemsize = dtype.itemsize
    total = math.prod(shape) * itemsize
    if sharding is None:
        return LeafRow(name, shape, str(dtype), "host", shape, total, 0, 0)
    shard_shape = tuple(sharding.shard_shape(shape))
    per_device = math.prod(shard_shape) * itemsize
    even = -(-total // sharding.num_devices)
    return LeafRow(
        name, shape, str(dtype), _spec(sharding), shard_shape, total, per_device, max(0, per_device - even)
    )


def _axes(shardings: list[Sharding | None]) -> tuple[dict[str, int], set[str]]:
    mesh_shape: dict[str, int] = {}
    used: set[str] = set()
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            mesh_shape.update(sharding.mesh.shape)
            for entry in sharding.spec:
                used.update(entry if isinstance(entry, tuple) else () if entry is None else (entry,))
    return mesh_shape, used


def _spec(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        entries = ["+".join(e) if isinstance(e, tuple) else e or "-" for e in sharding.spec]
        return "(" + ", ".join(entries) + ")" if any(e != "-" for e in entries) else "replicated"
    return type(sharding).__name__


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "scalar"


def _unused_text(axis: str, count: int) -> str:
    return f"mesh axis {axis!r} of size {count} shards no array: every device along it holds the same bytes"
