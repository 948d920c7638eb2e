"""Qwen3MoeForCausalLM; one tensor an expert and projection. Layers without experts come first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_bridge.names import layers
from rollout_bridge.names.base import TensorSource, field

ARCHITECTURE = "Qwen3MoeForCausalLM"


def tensors(hf_config: Mapping[str, Any]) -> tuple[TensorSource, ...]:
    """Every checkpoint tensor; the layers in mlp_only_layers from ``dense/*``, the others from ``moe/*``."""
    return tuple(_tensors(hf_config))


def _tensors(c: Mapping[str, Any]) -> Iterator[TensorSource]:
    head_dim = c.get("head_dim") or field(c, "hidden_size") // field(c, "num_attention_heads")
    key = "num_local_experts" if c.get("num_experts") is None and "num_local_experts" in c else "num_experts"
    dense_layers = len(c.get("mlp_only_layers") or [])
    yield from layers.embedding(c)
    for layer in range(field(c, "num_hidden_layers")):
        prefix, dense = f"model.layers.{layer}", layer < dense_layers
        group, index = ("dense", layer) if dense else ("moe", layer - dense_layers)
        yield from layers.attention(c, prefix, group, index, head_dim=head_dim, bias=False, qk_norm=True)
        if dense:
            yield from layers.dense_mlp(c, prefix, index)
        else:
            yield from layers.experts(c, prefix, group, index, count=field(c, key))
        yield from layers.norms(c, prefix, group, index)
    yield from layers.final(c)
