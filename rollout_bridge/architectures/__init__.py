"""Families of models, one file each: config.json, tensor names and layouts, and what is quantised how.

A new family is a file, here or in a module of the user's own, which a config names `module:Name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollout_bridge import references
from rollout_bridge.architectures import base
from rollout_bridge.architectures.base import REQUIRED, Architecture
from rollout_bridge.architectures.decoder import ArchitectureError, DecoderConfig
from rollout_bridge.architectures.tensors import TensorSource, stack, unstack

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Architecture",
    "ArchitectureError",
    "DecoderConfig",
    "TensorSource",
    "class_name",
    "complete",
    "duplicates",
    "examine",
    "find",
    "from_tree",
    "read",
    "tensors",
    "to_tree",
    "usual",
    "write",
]

GROUP = "jaxtrain.architectures"  # entry points of installed packages
BUILTIN = {
    name: f"rollout_bridge.architectures.{name}:ARCHITECTURE"
    for name in ("glm4_moe", "qwen3_moe", "qwen3", "llama")
}
# Field of a run's config.json: the reference of a family whose model_type is no registered name.
REFERENCE = "jaxtrain_architecture"

HfConfig = Mapping[str, Any]


def find(name: str) -> Architecture:
    """The family of a registered name (its model_type) or of a reference. Raises `ArchitectureError`."""
    try:
        found = references.resolve(name, group=GROUP, builtin=BUILTIN, kind="architecture")
    except references.UnknownReference as error:
        raise ArchitectureError(str(error)) from error
    if not isinstance(found, Architecture):
        raise ArchitectureError(f"architecture {name!r}: is {found!r}, expected an Architecture")
    return found


def usual(name: str) -> dict[str, Any]:
    """Values that new models of the family `name` have by default."""
    return {item.name: item.new for item in find(name).fields if item.new is not REQUIRED}


def examine(hf_config: HfConfig) -> tuple[DecoderConfig | None, list[str]]:
    """The decoder that a config.json describes, and all its problems.

    Without a decoder there is at least one problem; a decoder with problems may still name its tensors.
    """
    key = REFERENCE if hf_config.get(REFERENCE) is not None else "model_type"
    name = hf_config.get(key)
    if not isinstance(name, str):
        return None, [f"{key}: {name!r} is not a name such as {next(iter(BUILTIN))!r}"]
    try:
        family = find(name)
    except ArchitectureError as error:
        return None, [f"{key}: {error}"]
    return base.examine(family, name, hf_config)


def read(hf_config: HfConfig) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises `ArchitectureError` naming every missing field and every value that is not implemented, at once.
    """
    decoder, problems = examine(hf_config)
    if decoder is None or problems:
        raise ArchitectureError("; ".join(problems))
    return decoder


def complete(name: str, values: Mapping[str, Any]) -> DecoderConfig:
    """A decoder of the family `name` from the values of its fields."""
    return base.complete(find(name), name, values, {})


def write(decoder: DecoderConfig) -> dict[str, Any]:
    """config.json of `decoder`, the inverse of `read`; the caller adds token ids of the tokenizer."""
    family = find(decoder.architecture)
    own = {} if decoder.architecture == family.model_type else {REFERENCE: decoder.architecture}
    return base.write(family, decoder) | own


def tensors(model: HfConfig | DecoderConfig) -> tuple[TensorSource, ...]:
    """Every tensor of the Hugging Face checkpoint of a config.json or its decoder, in the order of the file.

    Raises `ArchitectureError` as `read`.
    """
    decoder = model if isinstance(model, DecoderConfig) else read(model)
    return tuple(find(decoder.architecture).tensors(decoder))


def duplicates(decoder: DecoderConfig) -> dict[str, str]:
    """Tensors that a checkpoint may have beside `tensors`, each with the name of the one it repeats."""
    return find(decoder.architecture).duplicates(decoder)


def class_name(hf_config: HfConfig) -> str:
    """Name of the Hugging Face class of `hf_config`, such as ``Glm4MoeForCausalLM``."""
    return find(read(hf_config).architecture).class_name


def to_tree(hf_config: HfConfig, get: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Stacked parameters by path from `get(Hugging Face name)`; values and dtype as `get` gives them."""
    return stack(tensors(hf_config), get)


def from_tree(hf_config: HfConfig, params: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, tensor view) from stacked parameters by path: the inverse of `to_tree`."""
    return unstack(tensors(hf_config), params)
