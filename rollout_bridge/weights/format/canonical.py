"""Canonical tensors: what the weight chain carries, by Hugging Face name, as bits instead of numbers.

The scales of an FP8 tensor `x.weight` are a float32 tensor of their own, `x.weight_scale_inv`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rollout_bridge.architectures.tensors import TensorSource
from rollout_bridge.quantization.host import scale_shape
from rollout_bridge.quantization.plan import Format, QuantizationPlan, scale_name

# safetensors dtype -> the unsigned integer that holds its bits
BITS: dict[str, type[np.unsignedinteger]] = {"F8_E4M3": np.uint8, "BF16": np.uint16, "F32": np.uint32}


@dataclass(frozen=True)
class TensorSpec:
    """dtype as safetensors writes it, shape as Hugging Face has it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bits(self) -> np.dtype:
        """numpy dtype of the bits."""
        return np.dtype(BITS[self.dtype])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.bits.itemsize


def canonical_tensors(sources: Iterable[TensorSource], plan: QuantizationPlan) -> dict[str, TensorSpec]:
    """Every tensor of the chain, in checkpoint order, scales after their codes.

    Raises ValueError naming a tensor that the plan does not cover.
    """
    return specs_of({source.name: source.shape for source in sources}, plan)


def specs_of(shapes: Mapping[str, tuple[int, ...]], plan: QuantizationPlan) -> dict[str, TensorSpec]:
    """`canonical_tensors` from shapes by name."""
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes.items():
        chosen = plan.formats.get(name)
        if chosen is None:
            raise ValueError(f"tensor {name}: the quantization plan has no format for it; rebuild the plan")
        specs[name] = TensorSpec(chosen.value, tuple(shape))
        if chosen is Format.fp8_block:
            specs[scale_name(name)] = TensorSpec("F32", scale_shape(tuple(shape), plan.block))
    return specs
