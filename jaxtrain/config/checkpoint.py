"""The architecture of a model section that starts from given weights: the one of their config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtrain.config.base import rejection
from jaxtrain.huggingface.checkpoint import read_model_config
from jaxtrain.huggingface.errors import HuggingFaceError
from jaxtrain.models.architectures.registry import ARCHITECTURES
from jaxtrain.models.config import ModelConfig, ModelConfigError

FREE = ("rope_theta", "max_position_embeddings")  # no tensor depends on them: longer contexts change them


def fill_from_checkpoint(values: dict[str, Any]) -> dict[str, Any]:
    """`values` of a model section with `checkpoint`, and every field of its architecture.

    Raises the section's rejections: no such directory, an unsupported config.json, or a field given beside
    `checkpoint` that the weights contradict.
    """
    directory = values["checkpoint"]
    if values.get("preset") is not None:
        raise rejection("preset", f"{values['preset']!r} as well as model.checkpoint; leave one out")
    if not isinstance(directory, str) or not Path(directory).is_dir():
        raise rejection(
            "checkpoint",
            f"{directory!r} is no directory; name a Hugging Face one, an imported model or runs/NAME",
        )
    try:
        model = ModelConfig.from_hf(read_model_config(Path(directory)))
    except (HuggingFaceError, ModelConfigError) as error:
        raise rejection("checkpoint", str(error)) from error
    architecture = ARCHITECTURES[model.model_type]
    own = {item.name: getattr(model, item.name) for item in architecture.fields if item.name != "vocab_size"}
    own["architecture"] = model.model_type
    for name, value in own.items():
        if name not in FREE and values.get(name, value) not in (value, None):
            raise rejection(
                name, f"{values[name]!r} is not the {value!r} of {directory}/config.json; leave it out"
            )
    return own | {name: value for name, value in values.items() if value is not None}
