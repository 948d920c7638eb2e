"""Leaves of a tree with readable names: dicts, optax states, NNX State and Linen trees with boxed parameters.

A *box* is one parameter wrapped together with its metadata: a Linen `Partitioned` or
`LogicallyPartitioned`, an NNX `Variable`. Boxes are recognised by their methods, so this never
imports flax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf: its `/`-joined name, its value, and the logical axes its box declares (None without one)."""

    name: str
    value: Any
    logical_axes: LogicalAxes | None


def is_box(node: Any) -> bool:
    """True for a Linen metadata box or an NNX variable."""
    kind = type(node)
    linen = hasattr(kind, "unbox") and hasattr(kind, "replace_boxed")
    nnx = hasattr(kind, "get_metadata") and hasattr(kind, "get_value")
    return linen or nnx


def declared_axes(box: Any) -> LogicalAxes | None:
    """Logical axes a box carries: Linen `names`, NNX `out_sharding` (`sharding_names` before flax 0.12)."""
    if hasattr(type(box), "unbox"):
        names = getattr(box, "names", None)
    else:
        metadata = box.get_metadata()
        names = metadata.get("out_sharding", metadata.get("sharding_names"))
    return None if names is None else tuple(names)


def path_name(path: tuple[Any, ...]) -> str:
    """A jax key path as `params/dense/kernel`."""
    return "/".join(_key(entry) for entry in path)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Leaf]:
    """Leaves in the order of `jax.tree.leaves(tree)`; the content of a box has the name of the box."""

    def stop(node: Any) -> bool:
        return is_box(node) or (is_leaf is not None and is_leaf(node))

    found: list[Leaf] = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        if not is_box(node):
            found.append(Leaf(path_name(path), node, None))
            continue
        content = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_leaf)[0]
        for inner_path, value in content:
            inner = path if len(content) == 1 else (*path, *inner_path)
            found.append(Leaf(path_name(inner), value, declared_axes(node)))
    return found


def _key(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
