"""Glm4MoeForCausalLM (GLM-4.5, GLM-4.5-Air and smaller relatives).

Checkpoint layout: one tensor an expert and projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_bridge.names import layers
from rollout_bridge.names.base import TensorSource, field

ARCHITECTURE = "Glm4MoeForCausalLM"


def tensors(hf_config: Mapping[str, Any]) -> tuple[TensorSource, ...]:
    """Every checkpoint tensor; dense layers come from ``dense/*``, later ones from ``moe/*``."""
    return tuple(_tensors(hf_config))


def _tensors(c: Mapping[str, Any]) -> Iterator[TensorSource]:
    yield from layers.embedding(c)
    count, dense_layers = field(c, "num_hidden_layers"), field(c, "first_k_dense_replace")
    for layer in range(count):
        prefix = f"model.layers.{layer}"
        if layer < dense_layers:
            yield from _attention(c, prefix, "dense", layer)
            yield from layers.dense_mlp(c, prefix, layer)
            yield from layers.norms(c, prefix, "dense", layer)
        else:
            yield from _moe_layer(c, prefix, "moe", layer - dense_layers)
    yield from layers.final(c)


def _attention(c: Mapping[str, Any], prefix: str, group: str, index: int) -> Iterator[TensorSource]:
    return layers.attention(
        c,
        prefix,
        group,
        index,
        head_dim=c.get("head_dim") or field(c, "hidden_size") // field(c, "num_attention_heads"),
        bias=c.get("attention_bias", False),
        qk_norm=c.get("use_qk_norm", False),
    )


def _moe_layer(c: Mapping[str, Any], prefix: str, group: str, index: int) -> Iterator[TensorSource]:
    experts = field(c, "n_routed_experts")
    yield from _attention(c, prefix, group, index)
    yield from layers.experts(c, prefix, group, index, count=experts)
    bias = f"{prefix}.mlp.gate.e_score_correction_bias"
    yield TensorSource(bias, f"{group}/mlp/router/correction_bias", (index,), False, (experts,))
    shared = c.get("n_shared_experts") or 0
    if shared:
        width = shared * field(c, "moe_intermediate_size")
        theirs = f"{prefix}.mlp.shared_experts"
        yield from layers.swiglu(theirs, f"{group}/mlp/shared", (index,), field(c, "hidden_size"), width)
    yield from layers.norms(c, prefix, group, index)
