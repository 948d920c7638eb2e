"""Qwen3ForCausalLM, dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_bridge.names import layers
from rollout_bridge.names.base import TensorSource

ARCHITECTURE = "Qwen3ForCausalLM"


def tensors(hf_config: Mapping[str, Any]) -> tuple[TensorSource, ...]:
    """Every checkpoint tensor; all layers from ``dense/*``."""
    return tuple(layers.dense_decoder(hf_config, head_dim=hf_config.get("head_dim") or 128, qk_norm=True))
