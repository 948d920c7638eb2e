"""LlamaForCausalLM and what is built like it (SmolLM2), without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_bridge.names import layers
from rollout_bridge.names.base import TensorSource, field

ARCHITECTURE = "LlamaForCausalLM"


def tensors(hf_config: Mapping[str, Any]) -> tuple[TensorSource, ...]:
    """Every checkpoint tensor; all layers from ``dense/*``."""
    head_dim = hf_config.get("head_dim")
    if not head_dim:
        head_dim = field(hf_config, "hidden_size") // field(hf_config, "num_attention_heads")
    return tuple(layers.dense_decoder(hf_config, head_dim=head_dim, qk_norm=False))
