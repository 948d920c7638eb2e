"""How a Hugging Face tensor corresponds to a slice of a stacked parameter."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_bridge.architectures.decoder import ArchitectureError

if TYPE_CHECKING:  # a config is read without numpy
    import numpy as np


class Role(enum.StrEnum):
    """How a tensor is stored, and for matrices that may be FP8, how an engine's ranks share it.

    BF16, FLOAT32: stored so in every plan. QKV, GATE_UP: rows are split, and the engine merges the layer's
    tensors of this role into one matrix. ROW: columns are split. EXPERT_IN, EXPERT_OUT: of a routed expert,
    rows or columns are split; the engine quantises all experts of a layer or none.
    """

    BF16 = "bf16"
    FLOAT32 = "float32"
    QKV = "qkv"
    GATE_UP = "gate_up"
    ROW = "row"
    EXPERT_IN = "expert_in"
    EXPERT_OUT = "expert_out"


@dataclass(frozen=True)
class TensorSource:
    """Hugging Face tensor `name` is `params[path][index]`, its last two axes swapped if `transpose`.

    name: as in the Hugging Face checkpoint, such as ``model.layers.3.mlp.experts.7.up_proj.weight``.
    path: of the stacked parameter, such as ``moe/mlp/experts/up_proj``.
    index: of the leading axes of the stacked parameter: () or (layer,) or (layer, expert).
    shape: of the Hugging Face tensor.
    """

    name: str
    path: str
    index: tuple[int, ...]
    transpose: bool
    shape: tuple[int, ...]
    role: Role = Role.BF16

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of `params[path][index]`."""
        return self.shape[:-2] + self.shape[:-3:-1] if self.transpose else self.shape


def paths(sources: Iterable[TensorSource]) -> dict[str, tuple[TensorSource, ...]]:
    """Sources by parameter path, in row-major order of their index; each path's are checked to fill a box.

    Raises `ArchitectureError` if a path's indices have holes or its tensors differ in shape or orientation.
    """
    grouped: dict[str, list[TensorSource]] = {}
    for source in sources:
        grouped.setdefault(source.path, []).append(source)
    result = {}
    for path, group in grouped.items():
        group.sort(key=lambda source: source.index)
        lead = leading_shape(group)
        if [source.index for source in group] != list(itertools.product(*map(range, lead))):
            raise ArchitectureError(
                f"parameter {path}: {len(group)} tensors do not fill the box {lead} once each"
            )
        if len({(source.shape, source.transpose) for source in group}) != 1:
            raise ArchitectureError(
                f"parameter {path}: its tensors differ in shape, so they cannot be stacked"
            )
        result[path] = tuple(group)
    return result


def leading_shape(group: Iterable[TensorSource]) -> tuple[int, ...]:
    """Extent of the stacked axes of one path: () or (layers,) or (layers, experts)."""
    return tuple(max(axis) + 1 for axis in zip(*(source.index for source in group), strict=True))


def stacked_shape(group: tuple[TensorSource, ...]) -> tuple[int, ...]:
    """Shape of the stacked parameter of one path."""
    return leading_shape(group) + group[0].source_shape


def stack(sources: Iterable[TensorSource], get: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Stacked parameters by path, from Hugging Face tensors by name; values and dtype as `get` gives them."""
    import numpy as np

    tree = {}
    for path, group in paths(sources).items():
        lead = leading_shape(group)
        stacked: np.ndarray | None = None
        for source in group:
            tensor = np.asarray(get(source.name))
            if tensor.shape != source.shape:
                raise ArchitectureError(
                    f"tensor {source.name}: shape {tensor.shape}, expected {source.shape}; "
                    "the checkpoint and the configuration are of different models"
                )
            if stacked is None:
                stacked = np.empty(lead + source.source_shape, tensor.dtype)
            stacked[source.index] = tensor.swapaxes(-1, -2) if source.transpose else tensor
        assert stacked is not None
        tree[path] = stacked
    return tree


def unstack(
    sources: Iterable[TensorSource], params: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, tensor view) for every source, in the order of `sources`."""
    for source in sources:
        if source.path not in params:
            raise ArchitectureError(f"parameter {source.path} is missing: {source.name} is made from it")
        tensor = params[source.path][source.index]
        if tensor.shape != source.source_shape:
            raise ArchitectureError(
                f"parameter {source.path}{list(source.index)}: shape {tensor.shape}, expected "
                f"{source.source_shape} for {source.name}"
            )
        yield source.name, tensor.swapaxes(-1, -2) if source.transpose else tensor
