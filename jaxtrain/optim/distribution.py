"""Orthogonalises matrices that are split over a mesh, inside `jax.shard_map`.

N matrices on a device, A and B rows and columns of a whole matrix, a and b of a device's block,
M = min(A, B), K = max(A, B)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Float

from jaxtrain.optim.newton_schulz import (
    Algorithm,
    Normalization,
    Polynomial,
    floating_point_operations,
    gram_product,
    orthogonalize,
    polynomial_factor,
    scaled_by_factor,
    step_factor,
    undivided_operations,
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Mesh axes that cut rows, that cut columns, and that replicate the blocks. All are larger than 1."""

    mesh: Mesh | AbstractMesh
    row_axes: tuple[str, ...]
    column_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]

    def size(self, axes: Sequence[str]) -> int:
        """Number of devices along `axes`."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def blocks(self) -> int:
        """Number of blocks a matrix is cut into."""
        return self.size(self.row_axes + self.column_axes)

    @property
    def replicas(self) -> int:
        """Number of copies of each block."""
        return self.size(self.replica_axes)


def placement(
    path: str, shape: tuple[int, ...], sharding: NamedSharding | None, *, head_width: int | None
) -> Placement | None:
    """Returns where the matrices of a parameter are, or None on one device.

    Raises:
      ValueError: columns that are not whole heads of `head_width`, in the parameter or on a device.
    """
    if head_width is not None and shape[-1] % head_width:
        raise ValueError(
            f"{path}: {shape[-1]} columns are not whole heads of {head_width}; "
            "set muon.split_heads to the model's head width or to null"
        )
    if sharding is None or sharding.mesh.size == 1:
        return None
    mesh = sharding.mesh
    entries = tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
    by_dimension = [
        tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if mesh.shape[axis] > 1)
        for entry in entries
    ]
    row_axes, column_axes = by_dimension[-2:]
    used = {axis for axes in by_dimension for axis in axes}
    replica_axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in used)
    if head_width is not None and column_axes:
        block = shape[-1] // math.prod(mesh.shape[axis] for axis in column_axes)
        if block % head_width:
            raise ValueError(
                f"{path}: a device's {block} columns (mesh axes {column_axes}) are not whole heads of "
                f"{head_width}; shard the heads over fewer devices or set muon.split_heads to null"
            )
        column_axes = ()  # a device's block holds whole heads, so these axes only divide the matrices
    return Placement(mesh, row_axes, column_axes, replica_axes)


def orthogonalize_blocks(
    x_Nab: Float[Array, "N a b"],
    where: Placement,
    polynomials: tuple[Polynomial, ...],
    *,
    algorithm: Algorithm,
    normalization: Normalization,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "N a b"]:
    """Orthogonalises whole matrices, given and returned as this device's block of each.

    Each matrix goes to one device, unless there are so few that sharing each among all takes less time, as
    with an output head.
    """
    how: dict[str, Any] = {"algorithm": algorithm, "normalization": normalization, "dtype": dtype}
    if sharing_is_faster(x_Nab.shape, where, steps=len(polynomials), algorithm=algorithm):
        return _shared(x_Nab, where, polynomials, **how)
    return _owned(x_Nab, where, lambda x_NAB: orthogonalize(x_NAB, polynomials, **how))


def sharing_is_faster(shape: tuple[int, ...], where: Placement, *, steps: int, algorithm: Algorithm) -> bool:
    """Whether the busiest device has less arithmetic when each matrix is shared; shape: count and block."""
    count, rows, columns = shape
    m, k = sorted((rows * where.size(where.row_axes), columns * where.size(where.column_axes)))
    whole = floating_point_operations(m, k, steps=steps, algorithm=algorithm)
    undivided = undivided_operations(m, steps=steps, algorithm=algorithm)
    shared = count * (undivided + math.ceil((whole - undivided) / where.blocks))
    return shared < math.ceil(count / (where.blocks * where.replicas)) * whole


def _owned(
    x_Nab: Float[Array, "N a b"], where: Placement, function: Callable[[Array], Array]
) -> Float[Array, "N a b"]:
    """Gives each device whole matrices of its own, applies `function`, sends the blocks back.

    One all-to-all over the axes that cut the matrices on the way in, one on the way out, and an all-gather
    over the axes that replicate them, whose devices share the work. Matrices are padded with zeros to a
    multiple of the devices.
    """
    block_axes = where.row_axes + where.column_axes
    row_blocks, column_blocks = where.size(where.row_axes), where.size(where.column_axes)
    count, rows, columns = x_Nab.shape
    owned = math.ceil(count / (where.blocks * where.replicas))
    x_Nab = jnp.pad(x_Nab, ((0, owned * where.blocks * where.replicas - count), (0, 0), (0, 0)))
    if where.replicas > 1:
        start = jax.lax.axis_index(where.replica_axes) * owned * where.blocks
        x_Nab = jax.lax.dynamic_slice_in_dim(x_Nab, start, owned * where.blocks)
    if where.blocks > 1:
        x_Nab = jax.lax.all_to_all(x_Nab, block_axes, split_axis=0, concat_axis=0, tiled=True)
        x_Nab = x_Nab.reshape(row_blocks, column_blocks, owned, rows, columns).transpose(2, 0, 3, 1, 4)
    y_NAB = function(x_Nab.reshape(owned, row_blocks * rows, column_blocks * columns))
    if where.blocks > 1:
        y_NAB = y_NAB.reshape(owned, row_blocks, rows, column_blocks, columns).transpose(1, 3, 0, 2, 4)
        y_NAB = y_NAB.reshape(where.blocks * owned, rows, columns)
        y_NAB = jax.lax.all_to_all(y_NAB, block_axes, split_axis=0, concat_axis=0, tiled=True)
    if where.replicas > 1:
        y_NAB = jax.lax.all_gather(y_NAB, where.replica_axes, axis=0, tiled=True)
    return y_NAB[:count]


def _shared(
    x_Nab: Float[Array, "N a b"],
    where: Placement,
    polynomials: tuple[Polynomial, ...],
    *,
    algorithm: Algorithm,
    normalization: Normalization,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "N a b"]:
    """Gives each device a slice of the long side of every matrix; only Gram matrices are summed over devices.

    An all-reduce of N M^2 elements (one a step with `direct`), and, if the short side is cut, an all-to-all
    on the way in and one on the way out. Replicas do the same work.
    """
    rows, columns = (
        x_Nab.shape[1] * where.size(where.row_axes),
        x_Nab.shape[2] * where.size(where.column_axes),
    )
    if rows > columns:
        turned = dataclasses.replace(where, row_axes=where.column_axes, column_axes=where.row_axes)
        how: dict[str, Any] = {"algorithm": algorithm, "normalization": normalization, "dtype": dtype}
        return _shared(x_Nab.mT, turned, polynomials, **how).mT
    cuts, long = where.size(where.row_axes), x_Nab.shape[2]
    if cuts > 1:
        x_Nab = jnp.pad(x_Nab, ((0, 0), (0, 0), (0, -long % cuts)))
        x_Nab = jax.lax.all_to_all(x_Nab, where.row_axes, split_axis=2, concat_axis=1, tiled=True)

    def whole_gram(x_NMk: Array) -> Array:
        return jax.lax.psum(gram_product(x_NMk), where.row_axes + where.column_axes)

    gram_NMM = whole_gram(x_Nab)
    norm = jnp.maximum(jnp.sqrt(jnp.trace(gram_NMM, axis1=1, axis2=2))[:, None, None], 1e-7)
    gram_NMM = gram_NMM / norm**2
    if algorithm is Algorithm.gram:
        q_NMM = polynomial_factor(gram_NMM, polynomials, normalization)
        y_NMk = scaled_by_factor(q_NMM / norm, x_Nab).astype(dtype)
    else:
        first, *rest = polynomials
        q_NMM = step_factor(gram_NMM, first, normalization)
        y_NMk = scaled_by_factor(q_NMM / norm, x_Nab).astype(dtype)
        for polynomial in rest:
            q_NMM = step_factor(whole_gram(y_NMk), polynomial, Normalization.frobenius)
            y_NMk = scaled_by_factor(q_NMM, y_NMk).astype(dtype)
    if cuts > 1:
        y_NMk = jax.lax.all_to_all(y_NMk, where.row_axes, split_axis=1, concat_axis=2, tiled=True)
    return y_NMk[..., :long]
