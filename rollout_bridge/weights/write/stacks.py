"""Stacked arrays of bits as the trainer holds them, and the Hugging Face tensors in them.

A stack is [*lead, *tensor]: `lead` is () or (layers,) or (layers, experts), `tensor` a Hugging Face shape. A
`ShardBlock` is the part of a stack on one device: a box whose rows are tensors, or parts of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollout_bridge.architectures.tensors import TensorSource, leading_shape, paths
from rollout_bridge.delta.classes import ClassRanks, fine_classes
from rollout_bridge.quantization.plan import Format, QuantizationPlan, scale_name
from rollout_bridge.weights.format.canonical import TensorSpec, specs_of
from rollout_bridge.weights.write.encoder import Patch


@dataclass(frozen=True)
class Stack:
    """Tensors of one dtype and shape (`spec`); `names` are in row-major order of `lead`."""

    names: tuple[str, ...]
    lead: tuple[int, ...]
    spec: TensorSpec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lead + self.spec.shape


def stacks(sources: Sequence[TensorSource], plan: QuantizationPlan) -> dict[str, Stack]:
    """By key: the parameter path for codes and plain values, `scale_key(path)` for scales.

    Raises ValueError for a parameter whose tensors the plan stores in several formats.
    """
    result = {}
    for path, group in paths(sources).items():
        formats = {plan.formats[source.name] for source in group}
        if len(formats) > 1:
            raise ValueError(f"parameter {path}: its tensors have several formats: {sorted(formats)}")
        names = tuple(source.name for source in group)
        specs = specs_of({names[0]: group[0].shape}, plan)
        lead = leading_shape(group)
        result[path] = Stack(names, lead, specs[names[0]])
        if formats == {Format.fp8_block}:
            scales = tuple(scale_name(name) for name in names)
            result[scale_key(path)] = Stack(scales, lead, specs[scales[0]])
    return result


def scale_key(path: str) -> str:
    """Key of the scales of the FP8 parameter at `path`."""
    return path + "#scale"


@dataclass(frozen=True)
class StackRanks:
    """`quantization.device.class_ranks` of a stack of rows.

    ranks int32: of each change among the elements of its class, over all rows. sizes int32[rows, 16].
    """

    ranks: np.ndarray
    sizes: np.ndarray
    start: int

    def of_row(self, row: int, changes: slice, old: np.ndarray) -> ClassRanks:
        """The ranks within `row`, whose changes are at `changes` and replace `old`."""
        passed = self.sizes[:row].sum(axis=0, dtype=np.int64)[fine_classes(old, self.start)]
        return ClassRanks(self.ranks[changes] - passed, self.sizes[row].astype(np.int64), self.start)


@dataclass(frozen=True)
class ShardBlock:
    """The box `bounds` ([start, stop) along each axis) of a stack."""

    stack: Stack
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, stack: Stack, index: Sequence[slice]) -> ShardBlock:
        """From the slices of a shard (`jax.Shard.index`), unbounded ones included."""
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, stack.shape, strict=True))
        return cls(stack, bounds)

    @property
    def rows(self) -> int:
        """How many tensors, or parts of tensors, it holds."""
        return math.prod(stop - start for start, stop in self._lead)

    @property
    def _lead(self) -> tuple[tuple[int, int], ...]:
        return self.bounds[: len(self.stack.lead)]

    @property
    def rectangle(self) -> tuple[tuple[int, int], ...]:
        """The part of each tensor that the block holds."""
        return self.bounds[len(self.stack.lead) :]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(stop - start for start, stop in self.rectangle)

    @property
    def row_size(self) -> int:
        return math.prod(self.local_shape)

    @property
    def names(self) -> list[str]:
        """Tensor of each row."""
        grid = np.arange(math.prod(self.stack.lead)).reshape(self.stack.lead)
        mine = grid[tuple(slice(start, stop) for start, stop in self._lead)]
        return [self.stack.names[position] for position in mine.reshape(-1)]

    def full(self, values: np.ndarray) -> Iterator[Patch]:
        """One patch for each row, with all bits `values` of the block."""
        for name, row in zip(self.names, values.reshape(-1, *self.local_shape), strict=True):
            yield Patch(name=name, shape=self.stack.spec.shape, rectangle=self.rectangle, values=row)

    def changes(
        self,
        positions: np.ndarray,
        old: np.ndarray,
        new: np.ndarray,
        *,
        first_row: int = 0,
        before: np.ndarray | None = None,
        classes: StackRanks | None = None,
    ) -> Iterator[Patch]:
        """One patch for each changed row. positions: ascending, flat, from the start of row `first_row`.

        before: all old bits from that row on. classes: ranks of the changed elements among all old ones.
        """
        rows = positions // self.row_size
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        names = self.names
        for start, stop in zip(starts, [*starts, positions.size][1:], strict=True):
            row = int(rows[start])
            yield Patch(
                name=names[first_row + row],
                shape=self.stack.spec.shape,
                rectangle=self.rectangle,
                values=new[start:stop],
                indices=positions[start:stop].astype(np.int64) - row * self.row_size,
                old=old[start:stop],
                before=None if before is None else before.reshape(-1, self.row_size)[row],
                ranks=None if classes is None else classes.of_row(row, slice(start, stop), old[start:stop]),
            )

    def read(self, tensor: Callable[[str], np.ndarray]) -> np.ndarray:
        """The block's bits, from whole tensors by name."""
        slices = tuple(slice(start, stop) for start, stop in self.rectangle)
        shape = tuple(stop - start for start, stop in self.bounds)
        rows = [tensor(name)[slices] for name in self.names]
        return np.stack(rows).reshape(shape)


def changes_of(block: ShardBlock, old: np.ndarray, new: np.ndarray, *, first_row: int = 0) -> Iterator[Patch]:
    """Patches of a block, or of its rows from `first_row` on, compared on the host."""
    old, new = old.reshape(-1), new.reshape(-1)
    positions = np.flatnonzero(old != new)
    return block.changes(positions, old[positions], new[positions], first_row=first_row, before=old)
