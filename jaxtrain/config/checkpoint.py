"""The architecture of a model section that starts from given weights: the one of their config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtrain.config.base import rejection
from jaxtrain.huggingface.errors import HuggingFaceError
from rollout_bridge import architectures
from rollout_bridge.architectures import ArchitectureError

FREE = ("rope_theta", "max_position_embeddings")  # no tensor depends on them: longer contexts change them

# Stands for an architecture that only the trainer's host can read. No other value uses it, and no check of a
# length, clip or mesh fails because of it.
_STAND_IN = {"preset": "nano", "use_qk_norm": False, "max_position_embeddings": 1 << 40}
_OF_A_HOST = ("compute_dtype", "expert_implementation")


def of_a_fleet(values: dict[str, Any]) -> dict[str, Any]:
    """An experiment's values as a rollout host needs them: no tokenizer and no weights are looked up.

    Both come with run.json. With given weights, only the numerics of the model section are kept.
    """
    kept = {name: value for name, value in values.items() if name != "tokenizer"}
    model = values.get("model")
    if isinstance(model, dict) and model.get("checkpoint") is not None:
        kept["model"] = _STAND_IN | {name: model[name] for name in _OF_A_HOST if name in model}
        kept.pop("mesh", None)
    return kept


def fill_from_checkpoint(values: dict[str, Any]) -> dict[str, Any]:
    """`values` of a model section with `checkpoint`, and every field of its architecture.

    Raises the section's rejections: no such directory, an unsupported config.json, or a field given beside
    `checkpoint` that the weights contradict.
    """
    from jaxtrain.huggingface.checkpoint import read_model_config  # loads numpy, which no other config needs

    directory = values["checkpoint"]
    if values.get("preset") is not None:
        raise rejection("preset", f"{values['preset']!r} as well as model.checkpoint; leave one out")
    if not isinstance(directory, str) or not Path(directory).is_dir():
        raise rejection(
            "checkpoint",
            f"{directory!r} is no directory; name a Hugging Face one, an imported model or runs/NAME",
        )
    try:
        given = values.get("architecture")
        own = given if given not in architectures.BUILTIN else None  # a built-in one is compared below
        model = architectures.read(read_model_config(Path(directory), own))
    except (HuggingFaceError, ArchitectureError) as error:
        raise rejection("checkpoint", str(error)) from error
    fields = architectures.find(model.architecture).fields
    own = {item.name: getattr(model, item.name) for item in fields if item.name != "vocab_size"}
    own["architecture"] = model.architecture
    for name, value in own.items():
        if name not in FREE and values.get(name, value) not in (value, None):
            raise rejection(
                name, f"{values[name]!r} is not the {value!r} of {directory}/config.json; leave it out"
            )
    return own | {name: value for name, value in values.items() if value is not None}
