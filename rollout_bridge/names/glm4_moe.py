"""Glm4MoeForCausalLM (GLM-4.5, GLM-4.5-Air and smaller relatives).

Checkpoint layout: one tensor an expert and projection. The multi-token-prediction layer, which Hugging Face
and plain serving ignore, is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_bridge.names.base import TensorSource, field

ARCHITECTURE = "Glm4MoeForCausalLM"


def tensors(hf_config: Mapping[str, Any]) -> tuple[TensorSource, ...]:
    """Every checkpoint tensor; dense layers come from ``dense/*``, later ones from ``moe/*``."""
    return tuple(_tensors(hf_config))


def _tensors(c: Mapping[str, Any]) -> Iterator[TensorSource]:
    vocabulary, hidden = field(c, "vocab_size"), field(c, "hidden_size")
    layers, dense_layers = field(c, "num_hidden_layers"), field(c, "first_k_dense_replace")
    yield TensorSource("model.embed_tokens.weight", "embedding", (), False, (vocabulary, hidden))
    for layer in range(layers):
        dense = layer < dense_layers
        group, index = ("dense", layer) if dense else ("moe", layer - dense_layers)
        prefix = f"model.layers.{layer}"
        yield from _attention(c, prefix, group, index)
        yield from (_dense_mlp if dense else _moe_mlp)(c, prefix, index)
        for ours, theirs in (
            ("input_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
        ):
            yield TensorSource(f"{prefix}.{theirs}.weight", f"{group}/{ours}", (index,), False, (hidden,))
    yield TensorSource("model.norm.weight", "final_norm", (), False, (hidden,))
    if not c.get("tie_word_embeddings", False):
        yield TensorSource("lm_head.weight", "lm_head/kernel", (), True, (vocabulary, hidden))


def _attention(c: Mapping[str, Any], prefix: str, group: str, index: int) -> Iterator[TensorSource]:
    hidden, heads = field(c, "hidden_size"), field(c, "num_attention_heads")
    kv_heads = field(c, "num_key_value_heads")
    head_dim = c.get("head_dim") or hidden // heads
    for projection, width in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        ours, theirs = f"{group}/attention/{projection}", f"{prefix}.self_attn.{projection}"
        shape = (width * head_dim, hidden)
        yield TensorSource(f"{theirs}.weight", f"{ours}/kernel", (index,), True, shape)
        if c.get("attention_bias", False):
            yield TensorSource(f"{theirs}.bias", f"{ours}/bias", (index,), False, shape[:1])
    yield TensorSource(
        f"{prefix}.self_attn.o_proj.weight",
        f"{group}/attention/o_proj/kernel",
        (index,),
        True,
        (hidden, heads * head_dim),
    )
    if c.get("use_qk_norm", False):
        for norm in ("q_norm", "k_norm"):
            theirs = f"{prefix}.self_attn.{norm}.weight"
            yield TensorSource(theirs, f"{group}/attention/{norm}", (index,), False, (head_dim,))


def _swiglu(
    prefix: str, path: str, index: tuple[int, ...], hidden: int, width: int, leaf: str = "/kernel"
) -> Iterator[TensorSource]:
    for projection in ("gate_proj", "up_proj"):
        yield TensorSource(
            f"{prefix}.{projection}.weight", f"{path}/{projection}{leaf}", index, True, (width, hidden)
        )
    yield TensorSource(f"{prefix}.down_proj.weight", f"{path}/down_proj{leaf}", index, True, (hidden, width))


def _dense_mlp(c: Mapping[str, Any], prefix: str, index: int) -> Iterator[TensorSource]:
    yield from _swiglu(
        f"{prefix}.mlp", "dense/mlp", (index,), field(c, "hidden_size"), field(c, "intermediate_size")
    )


def _moe_mlp(c: Mapping[str, Any], prefix: str, index: int) -> Iterator[TensorSource]:
    hidden, experts = field(c, "hidden_size"), field(c, "n_routed_experts")
    width = field(c, "moe_intermediate_size")
    for expert in range(experts):
        yield from _swiglu(
            f"{prefix}.mlp.experts.{expert}", "moe/mlp/experts", (index, expert), hidden, width, leaf=""
        )
    router = f"{prefix}.mlp.gate"
    yield TensorSource(f"{router}.weight", "moe/mlp/router/kernel", (index,), True, (experts, hidden))
    yield TensorSource(
        f"{router}.e_score_correction_bias", "moe/mlp/router/correction_bias", (index,), False, (experts,)
    )
    shared = c.get("n_shared_experts") or 0
    if shared:
        yield from _swiglu(f"{prefix}.mlp.shared_experts", "moe/mlp/shared", (index,), hidden, shared * width)
