"""Named architectures: the values of `ModelSection` that a `model.preset` fills in. YAML may override any."""

from __future__ import annotations

from typing import Any

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    # Small enough to learn a string task in minutes on two CPU cores, with every part of the large ones.
    # Linear weights are multiples of 128 so that FP8 blocks are whole.
    "nano": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10_000.0,
        "use_qk_norm": True,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    },
    # GLM-4.5 technical report (arXiv 2508.06471), table 1, and the published config.json.
    "glm-4.5": {
        "hidden_size": 5120,
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1_000_000.0,
        "use_qk_norm": True,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    "glm-4.5-air": {
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1_000_000.0,
        "use_qk_norm": False,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
}
