"""Named models: the values of `ModelSection` that a `model.preset` fills in. YAML may override any.

A field that a preset leaves out has the usual value of its architecture (glm4_moe unless it names another).
Presets are Python and not YAML so that an installed package has them.
"""

from __future__ import annotations

from typing import Any

# As small as tests like them; one an architecture beside nano.
_TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}

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
        "max_position_embeddings": 512,
    },
    # GLM-4.5 technical report (arXiv 2508.06471), table 1, and the published config.json.
    "glm4_5_355b": {
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
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131_072,
        "num_nextn_predict_layers": 1,
    },
    "glm4_5_air": {
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
        "rope_theta": 1_000_000.0,
        "use_qk_norm": False,
        "max_position_embeddings": 131_072,
        "num_nextn_predict_layers": 1,
    },
    # Qwen3 technical report (arXiv 2505.09388), table 2, and the published config.json.
    "qwen3_30b_a3b": {
        "architecture": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40_960,
    },
    # SmolLM2 (arXiv 2502.02737) and the published config.json.
    "smollm2_135m": {
        "architecture": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8192,
        "initializer_range": 0.041666666666666664,
    },
    "tiny_qwen3_moe": {
        "architecture": "qwen3_moe",
        **_TINY,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
    "tiny_qwen3": {"architecture": "qwen3", **_TINY},
    "tiny_llama": {"architecture": "llama", **_TINY, "head_dim": 32},
}

# The models' own spellings.
PRESET_ALIASES = {
    "glm-4.5": "glm4_5_355b",
    "glm-4.5-air": "glm4_5_air",
    "qwen3-30b-a3b": "qwen3_30b_a3b",
    "smollm2-135m": "smollm2_135m",
}

# Entries of a published model's embedding; an experiment has its own tokenizer's.
PUBLISHED_VOCABULARIES = {
    "glm4_5_355b": 151_552,
    "glm4_5_air": 151_552,
    "qwen3_30b_a3b": 151_936,
    "smollm2_135m": 49_152,
}
