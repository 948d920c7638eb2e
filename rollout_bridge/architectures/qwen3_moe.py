"""Qwen3-MoE: QK-norm without biases, softmax router, no shared expert; dense layers only at the start."""

from __future__ import annotations

from rollout_bridge.architectures.base import COMMON, Architecture, Field, Json
from rollout_bridge.architectures.decoder import DecoderConfig, Scoring


def _dense_layers(hf_config: Json) -> list[int]:
    """Layers without experts by transformers' rule."""
    layers, only = hf_config.get("num_hidden_layers") or 0, hf_config.get("mlp_only_layers") or []
    step = _sparse_step(hf_config)
    return [layer for layer in range(layers) if layer in only or step < 1 or (layer + 1) % step]


def _sparse_step(hf_config: Json) -> int:
    step = hf_config.get("decoder_sparse_step")
    return 1 if step is None else step


def _refusals(hf_config: Json) -> list[str]:
    dense = _dense_layers(hf_config)
    if dense == list(range(len(dense))) and _sparse_step(hf_config) > 0:
        return []
    return [
        f"decoder_sparse_step: {_sparse_step(hf_config)} with mlp_only_layers "
        f"{hf_config.get('mlp_only_layers') or []} is not supported: layers without experts must come first"
    ]


def _as_list(config: DecoderConfig) -> list[int]:
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
        "first_k_dense_replace": lambda _, source: len(_dense_layers(source)),
        "n_shared_experts": 0,
        "routed_scaling_factor": 1.0,
        "router_scoring": Scoring.SOFTMAX,
        "correction_bias": False,
        "partial_rotary_factor": 1.0,
        "use_qk_norm": True,
        "attention_bias": False,
    },
    expected={"attention_bias": False, "use_sliding_window": False, "n_shared_experts": 0},
    written={
        "decoder_sparse_step": 1,
        "mlp_only_layers": _as_list,
        "use_sliding_window": False,
        "attention_bias": False,
    },
    refusals=_refusals,
)
