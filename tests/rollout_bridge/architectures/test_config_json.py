"""config.json in and out: what is read and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_bridge.architectures import BUILTIN, ArchitectureError, read, write
from rollout_bridge.architectures.decoder import Scoring
from tests.jaxtrain.models.tiny import HF_CONFIG, HF_CONFIGS, LLAMA, QWEN3, QWEN3_MOE


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_writing_and_reading_give_the_decoder_back(name: str):
    config = read(HF_CONFIGS[name])
    written = write(config)
    assert read(written) == config
    assert written["architectures"] == HF_CONFIGS[name]["architectures"]
    given = {key: value for key, value in HF_CONFIGS[name].items() if key in written and value is not None}
    assert {key: written[key] for key in given if key != "rope_parameters"} == {
        key: value for key, value in given.items() if key != "rope_parameters"
    }


def test_every_architecture_is_tried():
    assert {config["model_type"] for config in HF_CONFIGS.values()} == set(BUILTIN)


def test_a_dense_decoder_has_no_experts_and_routers_differ():
    llama, qwen, glm = read(LLAMA), read(QWEN3_MOE), read(HF_CONFIG)
    assert (llama.num_moe_layers, llama.n_routed_experts, llama.head_dim) == (0, 0, 8)
    assert (qwen.router_scoring, qwen.correction_bias, qwen.num_moe_layers) == (Scoring.SOFTMAX, False, 2)
    assert (glm.router_scoring, glm.correction_bias, glm.num_moe_layers) == (Scoring.SIGMOID, True, 2)


@pytest.mark.parametrize(
    ("config", "changes", "problems"),
    [
        (
            HF_CONFIG,
            {"n_group": 4, "hidden_act": "gelu", "num_experts_per_tok": 9, "attention_dropout": 0.1},
            [
                "n_group: 4 is not supported, expected 1",
                "hidden_act: 'gelu'",
                "num_experts_per_tok: 9 is not in [1, 8]",
                "attention_dropout: 0.1",
            ],
        ),
        (HF_CONFIG, {"tie_word_embeddings": True}, ["tie_word_embeddings: True is not supported"]),
        (
            HF_CONFIG,
            {"rope_theta": 5.0},
            ["rope_theta: 5.0 differs from rope_parameters.rope_theta, 10000.0"],
        ),
        (
            QWEN3_MOE,
            {"decoder_sparse_step": 2, "use_sliding_window": True, "vocab_size": None, "num_experts": None},
            [
                "missing vocab_size, num_experts;",
                "decoder_sparse_step: 2 with mlp_only_layers [0]",
                "use_sliding_window: True",
            ],
        ),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, ["layers without experts must come first"]),
        (
            QWEN3,
            {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": True},
            ["layer_types: ['sliding_attention']", "attention_bias: True"],
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "mlp_bias": True, "num_key_value_heads": 2},
            ["rope_scaling.rope_type: 'dynamic'", "mlp_bias: True", "num_key_value_heads: 2 does not divide"],
        ),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn"}}, ["rope_parameters.factor: missing"]),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": -8.0}},
            ["rope_scaling.factor: -8.0 is not a positive", "rope_scaling.low_freq_factor: missing"],
        ),
        (
            LLAMA,
            {"model_type": "gpt2"},
            ["architecture 'gpt2' is unknown", "glm4_moe, llama, qwen3, qwen3_moe", "module:Name"],
        ),
        ({"model_type": "llama"}, {}, ["missing vocab_size, hidden_size, num_hidden_layers"]),
    ],
)
def test_everything_unsupported_or_missing_is_named_at_once(
    config: dict[str, Any], changes: dict[str, Any], problems: list[str]
):
    with pytest.raises(ArchitectureError) as caught:
        read(config | changes)
    for problem in problems:
        assert problem in str(caught.value)
