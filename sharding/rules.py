"""Rules: logical axis names of a parameter ("embed", "heads") -> mesh axes; errors name both sides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharding.errors import ShardingError
from sharding.leaves import Leaf, LogicalAxes, named_leaves

MeshAxes = str | tuple[str, ...] | None
MAX_ERRORS_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """The target of each logical axis: one mesh axis, several (outermost first), or None to replicate.

    Attributes:
      rules: mapping from logical axis name to mesh axes. Stored as pairs; `as_dict` gives the mapping back.
    """

    rules: Mapping[str, MeshAxes] | tuple[tuple[str, MeshAxes], ...]

    def __post_init__(self) -> None:
        pairs = self.rules.items() if isinstance(self.rules, Mapping) else self.rules
        stored = tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs)
        object.__setattr__(self, "rules", stored)
        names = [name for name, _ in stored]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ShardingError(f"ShardingRules: logical axes {twice} have more than one rule")

    @property
    def as_dict(self) -> dict[str, MeshAxes]:
        """The rules as a dictionary."""
        return dict(self.rules)

    def restricted_to(self, mesh: Mesh | AbstractMesh) -> ShardingRules:
        """The same rules without the mesh axes that `mesh` lacks: one set of rules for meshes of any rank."""

        def keep(axes: MeshAxes) -> MeshAxes:
            kept = tuple(axis for axis in _as_tuple(axes) if axis in mesh.shape)
            return kept or None

        return ShardingRules(tuple((name, keep(axes)) for name, axes in self.as_dict.items()))

    def spec(
        self,
        logical_axes: LogicalAxes | None,
        shape: tuple[int, ...],
        mesh: Mesh | AbstractMesh,
        *,
        name: str = "array",
    ) -> PartitionSpec:
        """PartitionSpec of one array, without trailing Nones.

        Args:
          logical_axes: one name or None for each dimension of `shape`; None replicates the whole array.
          shape: its global shape.
          mesh: supplies axis sizes.
          name: how errors call the array.

        Raises:
          ShardingError: an argument of the wrong kind, rank mismatch, logical axis without a rule, mesh axis
            that `mesh` lacks, two dimensions on one mesh axis, or a dimension that its mesh axes do not
            divide.
        """
        _check_mesh("spec(logical_axes, shape, mesh)", mesh, logical_axes=logical_axes, shape=shape)
        if not isinstance(shape, tuple) or not all(hasattr(size, "__index__") for size in shape):
            raise ShardingError(f"{name}: shape: found {_found(shape)}, expected a tuple of sizes")
        if logical_axes is None:
            return PartitionSpec()
        if not is_logical_axes(logical_axes):
            raise ShardingError(
                f"{name}: logical_axes: found {_found(logical_axes)}, expected a tuple of names and Nones,"
                " one for each dimension"
            )
        if len(logical_axes) != len(shape):
            raise ShardingError(
                f"{name}: {len(logical_axes)} logical axes {logical_axes} for shape {shape} of rank"
                f" {len(shape)}; give one name or None for each dimension"
            )
        rules = self.as_dict
        taken: dict[str, str] = {}
        entries: list[MeshAxes] = []
        for dimension, (logical, size) in enumerate(zip(logical_axes, shape, strict=True)):
            if logical is not None and logical not in rules:
                raise ShardingError(
                    f"{name}: no rule for logical axis {logical!r} (dimension {dimension} of {logical_axes});"
                    f" rules exist for {sorted(rules)}"
                )
            rule = rules[logical] if logical is not None else None
            axes = _as_tuple(rule)
            side = f"dimension {dimension} by rule {logical!r} -> {rule!r}"
            for axis in axes:
                if axis not in mesh.shape:
                    raise ShardingError(
                        f"{name}: rule {logical!r} -> {rule!r} names mesh axis {axis!r}, absent from mesh"
                        f" {dict(mesh.shape)}; add the axis with size 1, or use rules.restricted_to(mesh)"
                    )
                if axis in taken:
                    raise ShardingError(
                        f"{name}: mesh axis {axis!r} would shard twice: {taken[axis]}, and {side};"
                        " map one of them to another mesh axis or to None"
                    )
                taken[axis] = side
            ways = math.prod(mesh.shape[axis] for axis in axes)
            if size % ways:
                factors = " x ".join(f"{axis}({mesh.shape[axis]})" for axis in axes)
                raise ShardingError(
                    f"{name}: dimension {dimension} ({logical!r}) of size {size} is not divisible by"
                    f" {ways} = {factors}; shape {shape}. Change the size, give {logical!r} fewer mesh axes,"
                    " or resize the mesh"
                )
            entries.append(axes[0] if len(axes) == 1 else (axes or None))
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def shardings(self, logical_axes: Any, shapes: Any, mesh: Mesh | AbstractMesh) -> Any:
        """NamedSharding for every leaf, in the tree structure of `shapes`.

        Args:
          logical_axes: tree whose leaves are tuples of names, or None to replicate. It may be a plain
            nested dict even where `shapes` is an NNX State or holds Linen boxes: leaves are matched by name.
          shapes: tree of arrays, ShapeDtypeStructs or shape tuples.
          mesh: the mesh to shard over.

        Raises:
          ShardingError: an argument of the wrong kind, leaves that exist on one side only, or every failing
            leaf's own error, one a line.
        """
        _check_mesh("shardings(logical_axes, shapes, mesh)", mesh, logical_axes=logical_axes, shapes=shapes)
        wanted = {
            leaf.name: leaf.value
            for leaf in named_leaves(logical_axes, lambda x: x is None or is_logical_axes(x))
        }
        arrays = named_leaves(shapes, _is_shape)
        _check_leaves(wanted, arrays)
        _check_same_names(set(wanted), {leaf.name for leaf in arrays})
        found: list[NamedSharding] = []
        errors: list[str] = []
        for leaf in arrays:
            shape = tuple(leaf.value) if _is_shape(leaf.value) else tuple(leaf.value.shape)
            try:
                found.append(NamedSharding(mesh, self.spec(wanted[leaf.name], shape, mesh, name=leaf.name)))
            except ShardingError as error:
                errors.append(str(error))
        _raise_all(errors)
        return jax.tree.unflatten(jax.tree.structure(shapes, is_leaf=_is_shape), found)


def logical_axes_of(tree: Any) -> dict[str, Any]:
    """Logical axes that Linen boxes and NNX variables of `tree` declare, None for a leaf that declares none.

    Returns a nested dict by leaf name, for the first argument of `ShardingRules.shardings`.
    """
    axes: dict[str, Any] = {}
    for leaf in named_leaves(tree):
        *parents, last = leaf.name.split("/")
        level = axes
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = leaf.logical_axes
    return axes


def is_logical_axes(node: Any) -> bool:
    """True for a tuple of axis names and Nones (the empty tuple of a scalar included)."""
    return type(node) is tuple and all(entry is None or isinstance(entry, str) for entry in node)


def _is_shape(node: Any) -> bool:
    return type(node) is tuple and all(isinstance(entry, int) for entry in node)


def _found(value: Any) -> str:
    """An argument as errors show it: a short value, or the type of a long one."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 60 else f"a {type(value).__name__}"


def _check_mesh(call: str, mesh: Any, **others: Any) -> None:
    if isinstance(mesh, Mesh | AbstractMesh):
        return
    misplaced = [name for name, value in others.items() if isinstance(value, Mesh | AbstractMesh)]
    hint = f"; {misplaced[0]} is a mesh: the order is {call}" if misplaced else ""
    if hasattr(mesh, "build"):
        hint = "; build the mesh first: spec.build()"
    raise ShardingError(f"{call}: mesh: found {_found(mesh)}, expected a jax.sharding.Mesh{hint}")


def _check_leaves(axes: Mapping[str, Any], arrays: list[Leaf]) -> None:
    errors = [
        f"{name}: logical_axes: found {_found(value)}, expected a tuple of names and Nones, or None"
        for name, value in axes.items()
        if value is not None and not is_logical_axes(value)
    ]
    errors += [
        f"{leaf.name}: shapes: found {_found(leaf.value)}, expected an array, a ShapeDtypeStruct or a shape"
        for leaf in arrays
        if not _is_shape(leaf.value) and not hasattr(leaf.value, "shape")
    ]
    if errors:
        errors.append("The order is shardings(logical_axes, shapes, mesh).")
    _raise_all(errors)


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _check_same_names(logical: set[str], arrays: set[str]) -> None:
    errors = [f"{name}: has logical axes but no array" for name in sorted(logical - arrays)]
    errors += [
        f"{name}: has no logical axes; give a tuple of names, or None" for name in sorted(arrays - logical)
    ]
    _raise_all(errors)


def _raise_all(errors: list[str]) -> None:
    if not errors:
        return
    shown = errors[:MAX_ERRORS_SHOWN]
    if len(errors) > len(shown):
        shown.append(f"... and {len(errors) - MAX_ERRORS_SHOWN} more")
    raise ShardingError("\n".join(shown))
