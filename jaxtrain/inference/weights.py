"""Converts the weight chain's canonical bits to the parameters of the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from rollout_bridge import architectures
from rollout_bridge.architectures.tensors import TensorSource, stack
from rollout_bridge.quantization.host import dequantize_block_fp8
from rollout_bridge.quantization.plan import Format, QuantizationPlan, scale_name
from rollout_bridge.weights.read.update import Update

Params = dict[str, jax.Array]


def load(
    update: Update,
    *,
    hf_config: Mapping[str, Any],
    plan: QuantizationPlan,
    compute_dtype: str,
    old: Params | None,
) -> Params:
    """Parameters of the version in `update`, on the default device.

    Matrices are dequantised exactly (BF16) and kept in `compute_dtype`; the router's bias stays float32. A
    stacked parameter without a changed tensor is shared with `old`.
    """
    sources = architectures.tensors(hf_config)
    changed = {source.path for source in sources if _changed(source, update)}
    needed = [source for source in sources if old is None or source.path in changed]
    get = _reader(update.tensor, plan)
    formats = {source.path: plan.formats[source.name] for source in needed}
    fresh = {
        path: jax.device_put(values.astype(np.float32 if formats[path] == Format.f32 else compute_dtype))
        for path, values in stack(needed, get).items()
    }
    return {**(old or {}), **fresh}


def _changed(source: TensorSource, update: Update) -> bool:
    return source.name in update.changed or scale_name(source.name) in update.changed


def _reader(tensor: Callable[[str], np.ndarray], plan: QuantizationPlan) -> Callable[[str], np.ndarray]:
    def get(name: str) -> np.ndarray:
        bits = tensor(name)
        match plan.formats[name]:
            case Format.fp8_block:
                scale = tensor(scale_name(name)).view(np.float32)
                return dequantize_block_fp8(bits, scale, name=name).view(ml_dtypes.bfloat16)
            case Format.bf16:
                return bits.view(ml_dtypes.bfloat16)
            case Format.f32:
                return bits.view(np.float32)

    return get
