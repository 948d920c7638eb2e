"""The names are those transformers saves, each with its shape, and the two layouts are one bijection."""

import dataclasses

import numpy as np
import pytest
from safetensors import safe_open

from rollout_bridge import architectures
from rollout_bridge.architectures import ArchitectureError
from rollout_bridge.architectures.tensors import paths, stacked_shape

CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_qk_norm": True,
    "attention_bias": True,
    "max_position_embeddings": 128,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 1.0,
}
VARIANTS = [
    CONFIG,
    CONFIG
    | {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 2, "n_shared_experts": 1},
]


@pytest.mark.parametrize("config", VARIANTS)
def test_every_tensor_transformers_saves_is_named_with_its_shape(config, tmp_path):
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    Glm4MoeForCausalLM(Glm4MoeConfig(**config)).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {source.name: source.shape for source in architectures.tensors(config)} == saved


@pytest.mark.parametrize("config", VARIANTS)
def test_stacking_and_unstacking_are_inverse(config):
    random = np.random.default_rng(0)
    tensors = {source.name: random.standard_normal(source.shape) for source in architectures.tensors(config)}
    tree = architectures.to_tree(config, tensors.__getitem__)
    back = dict(architectures.from_tree(config, tree))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
    assert sum(leaf.size for leaf in tree.values()) == sum(tensor.size for tensor in tensors.values())


def test_kernels_are_input_by_output_and_layers_are_stacked_by_kind():
    shapes = {path: stacked_shape(group) for path, group in paths(architectures.tensors(CONFIG)).items()}
    assert shapes["embedding"] == (64, 32)
    assert shapes["lm_head/kernel"] == (32, 64)
    assert shapes["moe/attention/k_proj/kernel"] == (2, 32, 16)
    assert shapes["moe/attention/k_proj/bias"] == (2, 16)
    assert shapes["dense/mlp/down_proj/kernel"] == (1, 48, 32)
    assert shapes["moe/mlp/experts/gate_proj"] == (2, 4, 32, 16)
    assert shapes["moe/mlp/experts/down_proj"] == (2, 4, 16, 32)
    assert shapes["moe/mlp/shared/up_proj/kernel"] == (2, 32, 32)
    assert shapes["moe/mlp/router/correction_bias"] == (2, 4)


def test_an_expert_lands_at_its_layer_and_index():
    tree = architectures.to_tree(
        CONFIG,
        lambda name: np.full(
            next(source.shape for source in architectures.tensors(CONFIG) if source.name == name),
            float("layers.2.mlp.experts.3.up_proj" in name),
        ),
    )
    up = tree["moe/mlp/experts/up_proj"]
    assert up[1, 3].all() and up.sum() == up[1, 3].size
    assert not tree["moe/mlp/experts/gate_proj"].any()


def test_a_tied_head_has_no_tensor_of_its_own():
    decoder = architectures.read(CONFIG)
    tied_decoder = dataclasses.replace(decoder, tie_word_embeddings=True)
    tied = {source.name for source in architectures.tensors(tied_decoder)}
    untied = {source.name for source in architectures.tensors(decoder)}
    assert untied - tied == {"lm_head.weight"}


def test_mistakes_are_named():
    with pytest.raises(ArchitectureError, match="architecture 'gpt2' is unknown"):
        architectures.tensors({"model_type": "gpt2"})
    with pytest.raises(ArchitectureError, match="'glm4_moe': missing vocab_size, hidden_size"):
        architectures.tensors({"model_type": "glm4_moe"})
    with pytest.raises(ArchitectureError, match=r"embed_tokens\.weight: shape \(1, 2\), expected \(64, 32\)"):
        architectures.to_tree(CONFIG, lambda name: np.zeros((1, 2)))
    with pytest.raises(ArchitectureError, match="parameter embedding is missing"):
        list(architectures.from_tree(CONFIG, {}))
