"""How a decoder is computed is the caller's to say; config.json says what."""

from __future__ import annotations

import dataclasses

from jaxtrain.config.model import ModelSection
from jaxtrain.models.config import NUMERICS, ModelConfig
from tests.jaxtrain.models.tiny import LLAMA


def test_numerics_are_the_callers():
    config = ModelConfig.from_hf(LLAMA, compute_dtype="float32", expert_implementation="dense", remat="full")
    assert config == dataclasses.replace(
        ModelConfig.from_hf(LLAMA),
        compute_dtype="float32",
        expert_implementation=type(config.expert_implementation)("dense"),
        remat=type(config.remat)("full"),
    )


def test_an_experiment_says_everything_that_is_said_about_computing():
    assert ModelSection.model_validate({"preset": "nano"}).numerics.keys() == NUMERICS.keys()
