"""Architectures by Hugging Face `model_type`. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.architectures import base, glm4_moe, llama, qwen3, qwen3_moe
from jaxtrain.models.architectures.base import Architecture
from jaxtrain.models.config import ModelConfig, ModelConfigError

ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.model_type: module.ARCHITECTURE for module in (glm4_moe, qwen3_moe, qwen3, llama)
}


def find(model_type: str | None) -> Architecture:
    """Raises `ModelConfigError` for an architecture that is not here."""
    if model_type not in ARCHITECTURES:
        raise ModelConfigError(
            f"config.json: model_type {model_type!r} is not one of {', '.join(ARCHITECTURES)}; a new one is "
            "a file in jaxtrain/models/architectures and a line in its registry"
        )
    return ARCHITECTURES[model_type]


def read_config(hf_config: Mapping[str, Any], **numerics: Any) -> ModelConfig:
    """The decoder of a config.json; see `base.read` for numerics and errors."""
    return base.read(find(hf_config.get("model_type")), hf_config, **numerics)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a decoder; token ids of the tokenizer are the caller's to add."""
    return base.write(find(config.model_type), config)
