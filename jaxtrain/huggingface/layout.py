"""Where a model, its configuration and its tokenizer are in the two kinds of directory.

A Hugging Face directory has everything in one place. A jaxtrain directory, of a run or an imported model, has

    config.json        as Hugging Face writes it, without a quantization_config
    tokenizer/         the files of the tokenizer
    checkpoints/STEP/  Orbax; parameters under `params/`, buffers under `buffers/`
"""

from __future__ import annotations

import enum
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.huggingface.errors import HuggingFaceError
from rollout_bridge.architectures import REFERENCE
from rollout_bridge.errors import ExpectedError
from rollout_bridge.files import write_whole

CONFIG, TOKENIZER, CHECKPOINTS = "config.json", "tokenizer", "checkpoints"
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


class ExportFormat(enum.StrEnum):
    """BF16 rounds the float32 masters. F32 keeps them. FP8 stores the blocks of the quantisation plan."""

    BF16 = "bf16"
    F32 = "f32"
    FP8 = "fp8"


class DestinationError(ExpectedError, ValueError):
    """A directory cannot be written: it exists already, or the disk has no room."""


def is_hugging_face(directory: Path) -> bool:
    """Whether weights are beside config.json, instead of in checkpoints/."""
    return not (directory / CHECKPOINTS).is_dir()


def companions_directory(directory: Path) -> Path:
    """Where the tokenizer of either kind of directory is."""
    return directory if is_hugging_face(directory) else directory / TOKENIZER


def companions(directory: Path) -> list[Path]:
    """The tokenizer's files in a directory, and others that are copied with the weights."""
    return [directory / name for name in COMPANIONS if (directory / name).is_file()]


def copy_companions(source: Path, destination: Path) -> None:
    """Copies the companions that `destination` does not have yet."""
    destination.mkdir(parents=True, exist_ok=True)
    for path in companions(source):
        if not (destination / path.name).exists():
            shutil.copyfile(path, destination / path.name)


def read_config(directory: Path, architecture: str | None = None) -> dict[str, Any]:
    """The config.json of a directory. Raises `HuggingFaceError`.

    architecture: name or `module:Name` of the model's family; None: that of a jaxtrain directory, else the
    model_type.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise HuggingFaceError(directory, [f"{path}: no such file; name a model's directory"]) from None
    except ValueError as error:
        raise HuggingFaceError(directory, [f"{path}: not JSON: {error}"]) from None
    if not isinstance(config, dict):
        raise HuggingFaceError(directory, [f"{path}: holds {type(config).__name__}, expected an object"])
    if is_hugging_face(directory):
        config.pop(REFERENCE, None)  # a published config.json must not name code to run
    if architecture not in (None, config.get("model_type")):
        config[REFERENCE] = architecture
    return config


def write_config(directory: Path, hf_config: Mapping[str, Any]) -> None:
    """Writes config.json whole or not at all."""
    write_whole(directory / CONFIG, json.dumps(hf_config, indent=2) + "\n")


def check_destination(destination: Path, *, nbytes: int) -> None:
    """Raises `DestinationError` if it has contents already or `nbytes` do not fit on its disk."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise DestinationError(f"{destination}: exists already; name another directory, or move it away")
    parent = next(path for path in destination.absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise DestinationError(
            f"{destination}: {nbytes / 1e9:.1f} GB are needed, {parent} has {free / 1e9:.1f}"
        )
