"""Architectures by Hugging Face `model_type`. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_bridge.names import base, glm4_moe, llama, qwen3, qwen3_moe
from rollout_bridge.names.base import NamesError, TensorSource


@dataclass(frozen=True)
class Architecture:
    """Class name that Hugging Face lists under `architectures`, and the tensors of a config.json.

    duplicates: names of tensors that a published checkpoint may have beside them, each with the one it
    repeats.
    """

    name: str
    tensors: Callable[[Mapping[str, Any]], tuple[TensorSource, ...]]
    duplicates: Callable[[Mapping[str, Any]], dict[str, str]] = lambda _: {}


ARCHITECTURES = {
    "glm4_moe": Architecture(glm4_moe.ARCHITECTURE, glm4_moe.tensors, glm4_moe.duplicates),
    "qwen3_moe": Architecture(qwen3_moe.ARCHITECTURE, qwen3_moe.tensors),
    "qwen3": Architecture(qwen3.ARCHITECTURE, qwen3.tensors),
    "llama": Architecture(llama.ARCHITECTURE, llama.tensors),
}


def tensors(hf_config: Mapping[str, Any]) -> tuple[TensorSource, ...]:
    """Every tensor of the Hugging Face checkpoint of `hf_config` (a config.json), in the order of the file.

    Raises `NamesError` for an unknown model_type or a missing field.
    """
    return _find(hf_config).tensors(hf_config)


def duplicates(hf_config: Mapping[str, Any]) -> dict[str, str]:
    """Tensors that a checkpoint may have beside `tensors`, each with the name of the one it repeats."""
    return _find(hf_config).duplicates(hf_config)


def architecture(hf_config: Mapping[str, Any]) -> str:
    """Name of the Hugging Face class of `hf_config`, such as ``Glm4MoeForCausalLM``."""
    return _find(hf_config).name


def to_tree(hf_config: Mapping[str, Any], get: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Stacked parameters by path from `get(Hugging Face name)`; values and dtype as `get` gives them."""
    return base.stack(tensors(hf_config), get)


def from_tree(
    hf_config: Mapping[str, Any], params: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, tensor view) from stacked parameters by path: the inverse of `to_tree`."""
    return base.unstack(tensors(hf_config), params)


def _find(hf_config: Mapping[str, Any]) -> Architecture:
    model_type = hf_config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise NamesError(
            f"config.json: model_type {model_type!r} is not one of {sorted(ARCHITECTURES)}; "
            "add a file to rollout_bridge/names and a line to its registry"
        )
    return ARCHITECTURES[model_type]
