"""Parameters and operations: published counts of the real models, and a small one by hand."""

from __future__ import annotations

import pytest

from jaxtrain.config.model import ModelSection
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.flops import inference_flops, parts, training_flops
from tests.jaxtrain.models.tiny import HF_CONFIG


def preset(name: str, vocab_size: int):
    section = ModelSection.model_validate({"preset": name})
    hf_config = section.hf_config(vocab_size=vocab_size, eos_token_id=0, pad_token_id=0)
    return define(ModelConfig.from_hf({**hf_config, "num_nextn_predict_layers": 0}))


@pytest.mark.parametrize(
    ("name", "total", "active"), [("glm-4.5", 355e9, 32e9), ("glm-4.5-air", 106e9, 12e9)]
)
def test_the_published_sizes_of_glm45(name, total, active):
    """arXiv 2508.06471: 355B parameters, 32B active; Air 106B and 12B. Their MTP layer is not counted here;
    nor, among the active, is the lookup of the embedding.
    """
    found = parts(preset(name, 151552))
    assert sum(part.parameters for part in found) == pytest.approx(total, rel=0.02)
    used = sum(part.active for part in found if part.name != "embedding")
    assert used == pytest.approx(active, rel=0.08)


def test_a_small_model_by_hand():
    """3 layers (1 dense, 2 MoE), D 64, 4 query and 2 kv heads of 16, V 128, 8 experts of 32, 2 a token."""
    definition = define(ModelConfig.from_hf(HF_CONFIG, compute_dtype="float32"))
    attention = 64 * (64 + 32 + 32 + 64)
    expert = 3 * 64 * 32
    matmul = {part.name: part.matmul for part in parts(definition)}
    assert matmul == {
        "embedding": 0,
        "norms": 0,
        "lm_head": 64 * 128,
        "attention": 3 * attention,
        "dense_mlp": 3 * 64 * 96,
        "router": 2 * 64 * 8,
        "routed_experts": 2 * 2 * expert,
        "shared_experts": 2 * expert,
    }
    flops = training_flops(definition)
    assert flops.per_token == 6 * sum(matmul.values())
    # Scores and mixing, 2 operations each a channel, three times (forward and two gradients), 3 layers of 64.
    assert flops.per_pair == 2 * 2 * 3 * 3 * 64
    # A document of 3 tokens: its queries see 1, 2 and 3 keys.
    assert 3 * flops.at_length(3) == flops.total(tokens=3, pairs=6)
    forward = inference_flops(definition)
    assert (3 * forward.per_token, 3 * forward.per_pair) == (flops.per_token, flops.per_pair)


def test_every_parameter_is_in_one_part():
    definition = define(ModelConfig.from_hf(HF_CONFIG, compute_dtype="float32"))
    total = sum(leaf.size for leaf in definition.shapes.values())
    assert sum(part.parameters for part in parts(definition)) == total
