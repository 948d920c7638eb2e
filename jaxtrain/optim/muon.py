"""Muon: momentum whose matrices are orthogonalised.

N matrices on a device, A and B rows and columns of a whole matrix, a and b of a device's block
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxtrain.optim.distribution import Placement, orthogonalize_blocks, placement
from jaxtrain.optim.newton_schulz import Algorithm, Normalization, coefficients, orthogonalize


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Settings of Muon.

    Attributes:
      momentum: decay of the average of gradients. 0.95 in GLM-4.5 (arXiv 2508.06471).
      nesterov: orthogonalise the average looked one gradient ahead.
      newton_schulz_steps: iterations; 5 in GLM-4.5.
      coefficients: a name in `newton_schulz.COEFFICIENTS`. GLM-4.5's are unpublished; "standard" is
        Moonlight's.
      algorithm: order of computation; "gram" takes less arithmetic (see `newton_schulz.Algorithm`).
      normalization: what a matrix is divided by before it (see `newton_schulz.Normalization`).
      update_rms: root mean square of an update at learning rate 1, for a matrix of full rank; 0.2 in GLM-4.5.
      weight_decay: decoupled, multiplied by the learning rate; 0.1 in GLM-4.5.
      momentum_dtype: storage of the average.
      iteration_dtype: dtype of the iteration and of its communication. "bfloat16" is the usual choice on
        accelerators; "float32" gives the same result on every mesh.
      split_heads: width of an attention head, to orthogonalise each head of the q, k and v projections
        on its own, or None to take each projection whole (GLM-4.5).
    """

    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    coefficients: str = "standard"
    algorithm: Algorithm = Algorithm.direct
    normalization: Normalization = Normalization.frobenius
    update_rms: float = 0.2
    weight_decay: float = 0.1
    momentum_dtype: str = "float32"
    iteration_dtype: str = "float32"
    split_heads: int | None = None


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """The matrices of one parameter of shape [..., A, B], and their sharding.

    Attributes:
      shape: of the parameter; all axes before the last two count matrices.
      head_width: if given, columns are cut into this many at a time, each cut a matrix of its own.
      sharding: how the parameter, its gradient and its momentum are laid out; None on one device.
    """

    shape: tuple[int, ...]
    head_width: int | None = None
    sharding: NamedSharding | None = None

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        rows, columns = self.shape[-2:]
        return rows, self.head_width or columns

    @property
    def count(self) -> int:
        """Number of matrices in the parameter."""
        rows, columns = self.matrix
        return math.prod(self.shape) // (rows * columns)

    @property
    def held(self) -> int:
        """Number of matrices of which a device holds a block or the whole."""
        if self.sharding is None:
            return self.count
        *stack, _, columns = self.sharding.shard_shape(self.shape)
        return math.prod(stack) * (columns // self.head_width if self.head_width else 1)


class MuonState(NamedTuple):
    """Average of gradients by parameter path, sharded as the parameters."""

    momentum: dict[str, Array]


def scale_by_muon(config: MuonConfig, layouts: Mapping[str, MatrixLayout]) -> optax.GradientTransformation:
    """Returns the transformation gradients -> orthogonal directions of root mean square `update_rms`.

    Trees are flat dicts with the keys of `layouts`. Directions point along the gradient (the caller subtracts
    them), without weight decay. Sharded arrays must come laid out as `layouts` says.

    The momentum rule is that of torch.optim.Muon and Moonlight (arXiv 2502.16982); the scale,
    update_rms * sqrt(max(A, B)), is Moonlight's equation 4.
    """
    _check(config)
    groups = groups_of(layouts)
    momentum_dtype = jnp.dtype(config.momentum_dtype)
    iteration_dtype = jnp.dtype(config.iteration_dtype)

    def init(params: Any) -> MuonState:
        return MuonState({path: jnp.zeros_like(params[path], dtype=momentum_dtype) for path in layouts})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        beta = config.momentum
        momentum: dict[str, Array] = {}
        directions: dict[str, Array] = {}
        for path in layouts:
            gradient = updates[path].astype(jnp.float32)
            average = beta * state.momentum[path].astype(jnp.float32) + (1 - beta) * gradient
            momentum[path] = average.astype(momentum_dtype)
            directions[path] = beta * average + (1 - beta) * gradient if config.nesterov else average

        for group in groups:
            matrices = _orthogonalize_group(
                group, [directions[path].astype(iteration_dtype) for path in group.layouts], config
            )
            scale = config.update_rms * math.sqrt(max(group.matrix))
            for path, matrix in zip(group.layouts, matrices, strict=True):
                directions[path] = (scale * matrix.astype(jnp.float32)).astype(updates[path].dtype)
        return directions, MuonState(momentum)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class MuonGroup:
    """Parameters whose matrices have one shape and one placement; their blocks are exchanged together."""

    matrix: tuple[int, int]
    placement: Placement | None
    layouts: dict[str, MatrixLayout]


def _check(config: MuonConfig) -> None:
    coefficients(config.coefficients, config.newton_schulz_steps)
    for name, names in (("algorithm", Algorithm), ("normalization", Normalization)):
        if getattr(config, name) not in list(names):
            raise ValueError(
                f"muon.{name}: found {getattr(config, name)!r}, expected one of {[*map(str, names)]}"
            )
    if not 0 <= config.momentum < 1:
        raise ValueError(f"muon.momentum: found {config.momentum}, expected at least 0 and below 1")
    for name in ("momentum_dtype", "iteration_dtype"):
        dtype = jnp.dtype(getattr(config, name))
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"muon.{name}: found {dtype}, expected a floating type such as float32 or bfloat16"
            )


def _orthogonalize_group(group: MuonGroup, arrays: Sequence[Array], config: MuonConfig) -> Sequence[Array]:
    polynomials = coefficients(config.coefficients, config.newton_schulz_steps)
    how: dict[str, Any] = {
        "algorithm": Algorithm(config.algorithm),
        "normalization": Normalization(config.normalization),
        "dtype": config.iteration_dtype,
    }
    widths = [layout.head_width for layout in group.layouts.values()]

    def local(*blocks: Array) -> tuple[Array, ...]:
        stacks = [_to_matrices(block, width) for block, width in zip(blocks, widths, strict=True)]
        x_Nab = stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)
        if group.placement is None:
            y_Nab = orthogonalize(x_Nab, polynomials, **how)
        else:
            y_Nab = orthogonalize_blocks(x_Nab, group.placement, polynomials, **how)
        ends = list(itertools.accumulate(stack.shape[0] for stack in stacks))
        return tuple(
            _from_matrices(piece, block.shape, width)
            for piece, block, width in zip(jnp.split(y_Nab, ends[:-1]), blocks, widths, strict=True)
        )

    if group.placement is None:
        return local(*arrays)
    specs = tuple(layout.sharding.spec for layout in group.layouts.values() if layout.sharding is not None)
    return jax.shard_map(local, mesh=group.placement.mesh, in_specs=specs, out_specs=specs, check_vma=False)(
        *arrays
    )


def groups_of(layouts: Mapping[str, MatrixLayout]) -> list[MuonGroup]:
    """Returns the groups in which parameters are orthogonalised together."""
    found: dict[Any, MuonGroup] = {}
    for path, layout in layouts.items():
        where = placement(path, layout.shape, layout.sharding, head_width=layout.head_width)
        key = (layout.matrix, where)
        found.setdefault(key, MuonGroup(layout.matrix, where, {})).layouts[path] = layout
    return list(found.values())


def _to_matrices(block: Float[Array, "... a b"], head_width: int | None) -> Float[Array, "N a b"]:
    *_, rows, columns = block.shape
    if head_width is None:
        return block.reshape(-1, rows, columns)
    return (
        block.reshape(-1, rows, columns // head_width, head_width)
        .swapaxes(1, 2)
        .reshape(-1, rows, head_width)
    )


def _from_matrices(
    x_Nab: Float[Array, "N a b"], shape: tuple[int, ...], head_width: int | None
) -> Float[Array, "... a b"]:
    if head_width is None:
        return x_Nab.reshape(shape)
    *_, rows, columns = shape
    return x_Nab.reshape(-1, columns // head_width, rows, head_width).swapaxes(1, 2).reshape(shape)


def layout_of(leaf: Any, *, head_width: int | None = None) -> MatrixLayout:
    """Returns the layout of an array or ShapeDtypeStruct [..., A, B]; without a NamedSharding, one device."""
    sharding = getattr(leaf, "sharding", None)
    named = sharding if isinstance(sharding, NamedSharding) else None
    return MatrixLayout(tuple(leaf.shape), head_width, named)
