"""The decoder's parameters and the tensors of its checkpoint are of one reading of config.json."""

from __future__ import annotations

from typing import Any

import pytest

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from rollout_bridge import architectures
from rollout_bridge.architectures.tensors import paths, stacked_shape
from tests.jaxtrain.models.tiny import HF_CONFIGS, QWEN3_MOE

# transformers' rule: layer i has experts if i + 1 is a multiple of the step; so layer 0 alone is dense.
EVERY_SECOND = QWEN3_MOE | {"num_hidden_layers": 2, "decoder_sparse_step": 2, "mlp_only_layers": []}


@pytest.mark.parametrize(
    "config", [*HF_CONFIGS.values(), EVERY_SECOND], ids=[*HF_CONFIGS, "every second layer"]
)
def test_every_parameter_is_made_of_tensors_of_its_shape(config: dict[str, Any]):
    shapes = {path: leaf.shape for path, leaf in define(ModelConfig.from_hf(config)).shapes.items()}
    assert {
        path: stacked_shape(group) for path, group in paths(architectures.tensors(config)).items()
    } == shapes


def test_the_first_of_two_layers_is_dense_at_a_step_of_two():
    shapes = define(ModelConfig.from_hf(EVERY_SECOND)).shapes
    assert shapes["dense/mlp/up_proj/kernel"].shape == (1, 64, 96)
    assert shapes["moe/mlp/experts/up_proj"].shape == (1, 8, 64, 32)
