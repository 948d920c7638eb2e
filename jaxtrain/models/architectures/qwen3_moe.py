"""Qwen3-MoE: QK-norm without biases, softmax router, no shared expert; dense layers only at the start."""

from __future__ import annotations

from typing import Any

from jaxtrain.models.architectures.base import COMMON, Architecture, Field, Json
from jaxtrain.models.config import Scoring


def _dense_layers(hf_config: Json) -> list[int] | None:
    """Layers without experts by transformers' rule, None where a field that decides is missing."""
    step = hf_config.get("decoder_sparse_step")
    step = 1 if step is None else step
    layers, only = hf_config.get("num_hidden_layers"), hf_config.get("mlp_only_layers") or []
    if layers is None or step < 1:
        return None
    return [layer for layer in range(layers) if layer in only or (layer + 1) % step]


def _leading(values: Json, source: Json) -> int:
    """Experiments say `first_k_dense_replace`; a config.json lists the layers."""
    return values.get("first_k_dense_replace", len(_dense_layers(source) or []))


def _refusals(hf_config: Json) -> list[str]:
    dense = _dense_layers(hf_config)
    if dense is None or dense != list(range(len(dense))):
        return [
            f"decoder_sparse_step {hf_config.get('decoder_sparse_step')!r} with mlp_only_layers "
            f"{hf_config.get('mlp_only_layers')!r} is not supported: layers without experts must come first"
        ]
    return []


def _as_list(config: Any) -> list[int]:
    return list(range(config.first_k_dense_replace))


ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    fields=(
        *COMMON,
        Field(name="head_dim", absent=lambda c: c["hidden_size"] // max(c["num_attention_heads"], 1)),
        Field(name="intermediate_size"),
        Field(name="moe_intermediate_size"),
        Field(name="n_routed_experts", keys=("num_experts", "num_local_experts", "n_routed_experts")),
        Field(name="num_experts_per_tok"),
        # transformers' default; every published Qwen3-MoE normalises.
        Field(name="norm_topk_prob", absent=False, new=True),
        Field(name="rope_theta", new=1_000_000.0),
        Field(name="rms_norm_eps", new=1e-6),
        Field(name="tie_word_embeddings", absent=False, new=False),
    ),
    implied={
        "first_k_dense_replace": _leading,
        "n_shared_experts": 0,
        "routed_scaling_factor": 1.0,
        "router_scoring": Scoring.SOFTMAX,
        "correction_bias": False,
        "partial_rotary_factor": 1.0,
        "use_qk_norm": True,
        "attention_bias": False,
    },
    expected={"attention_bias": False, "use_sliding_window": False, "n_shared_experts": 0},
    written={"decoder_sparse_step": 1, "mlp_only_layers": _as_list, "use_sliding_window": False,
             "attention_bias": False},
    refusals=_refusals,
)
