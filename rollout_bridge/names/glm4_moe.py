"""Glm4MoeForCausalLM (GLM-4.5, GLM-4.5-Air and smaller relatives).

Checkpoint layout: one tensor an expert and projection. The layers that predict further tokens (MTP) follow
the others; published checkpoints repeat the embedding and the head in each, see `duplicates`.
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
    for depth in range(c.get("num_nextn_predict_layers") or 0):
        yield from _next_token_layer(c, f"model.layers.{count + depth}", depth)
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


def _next_token_layer(c: Mapping[str, Any], prefix: str, depth: int) -> Iterator[TensorSource]:
    hidden = field(c, "hidden_size")
    for norm in ("enorm", "hnorm"):
        yield TensorSource(f"{prefix}.{norm}.weight", f"mtp/{norm}", (depth,), False, (hidden,))
    joint = (hidden, 2 * hidden)
    yield TensorSource(f"{prefix}.eh_proj.weight", "mtp/eh_proj/kernel", (depth,), True, joint)
    yield from _moe_layer(c, prefix, "mtp/layer", depth)
    yield TensorSource(f"{prefix}.shared_head.norm.weight", "mtp/output_norm", (depth,), False, (hidden,))


def duplicates(c: Mapping[str, Any]) -> dict[str, str]:
    """Tensors of a published checkpoint that repeat another: name -> name of the one that is read.

    Engines take the originals for them (vLLM 0.32, transformers 5), so they are neither needed nor written.
    """
    found = {}
    for depth in range(c.get("num_nextn_predict_layers") or 0):
        prefix = f"model.layers.{field(c, 'num_hidden_layers') + depth}"
        found[f"{prefix}.embed_tokens.weight"] = "model.embed_tokens.weight"
        found[f"{prefix}.shared_head.head.weight"] = "lm_head.weight"
    return found
