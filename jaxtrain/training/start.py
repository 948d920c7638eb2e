"""What a run starts from: its tokenizer, its config.json, and given weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.schema import ExperimentConfig
from jaxtrain.data import tokenizer as task_tokenizer
from jaxtrain.huggingface.layout import TOKENIZER, companions_directory, copy_companions, read_config
from jaxtrain.losses.token_logprobs import VOCABULARY_MULTIPLE
from jaxtrain.training.saved import SavedModel, open_model
from sharding import processes

Texts = Callable[[], Iterable[str]]


@dataclass(frozen=True)
class Start:
    """tokenizer_dir: where the tokenizer's files are. hf_config: config.json of the run.

    weights: those that a new run begins with; None for random ones, and where the run has a checkpoint.
    """

    tokenizer: Any
    tokenizer_dir: Path
    hf_config: dict[str, Any]
    weights: SavedModel | None


def open_start(config: ExperimentConfig, run_dir: Path, *, resumed: bool, texts: Texts | None) -> Start:
    """Opens and checks everything; reads no weights. All processes call it.

    resumed: whether the run has a checkpoint. Its directory then holds what it began with, and the directory
    of the given weights may be gone. texts: what a tokenizer is built from where none is given.
    """
    given = Path(config.model.checkpoint) if config.model.checkpoint is not None else None
    if given is not None and resumed:
        given = run_dir
    weights = None
    if given is not None and given != run_dir:
        weights = open_model(given, architecture=config.model.architecture)
    directory = ensure_tokenizer(config, run_dir, given, texts)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    given_config = weights.hf_config if weights is not None else read_config(run_dir) if given else None
    return Start(tokenizer, directory, hf_config_of(config, tokenizer, given_config, given), weights)


def hf_config_of(
    config: ExperimentConfig, tokenizer: Any, given: dict[str, Any] | None, directory: Path | None
) -> dict[str, Any]:
    """config.json of the run: the model section's, the vocabulary, and the special tokens' ids.

    given, directory: config.json of given weights and where it is. Their special tokens, several of which may
    end an answer, take precedence over the tokenizer's; those of generation_config.json before config.json's.
    """
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if given is not None and directory is not None:
        ids["bos_token_id"] = tokenizer.bos_token_id
        path = companions_directory(directory) / "generation_config.json"
        generation = json.loads(path.read_bytes()) if path.exists() else {}
        for name in ids:
            found = [source.get(name) for source in (generation, given)]
            ids[name] = next((value for value in found if value is not None), ids[name])
    if ids["eos_token_id"] is None:
        raise ConfigError(["tokenizer.path: it has no end-of-sequence token; name a tokenizer with one"])
    written = config.model.hf_config(
        vocab_size=vocabulary_size(len(tokenizer), given, directory),
        eos_token_id=ids["eos_token_id"],
        pad_token_id=ids["pad_token_id"],
    )
    return written | ({"bos_token_id": ids["bos_token_id"]} if ids.get("bos_token_id") is not None else {})


def vocabulary_size(tokens: int, given: dict[str, Any] | None, directory: Path | None) -> int:
    """Rows of the embedding: those of given weights, or enough for the tokenizer's `tokens`."""
    if given is None:
        return -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    size = int(given["vocab_size"])
    if tokens > size:
        raise ConfigError(
            [
                f"tokenizer.path: its {tokens} tokens are more than the {size} rows of the embedding in "
                f"{directory}; use the tokenizer the model was trained with"
            ]
        )
    return size


def ensure_tokenizer(
    config: ExperimentConfig, run_dir: Path, weights: Path | None, texts: Texts | None
) -> Path:
    """A tokenizer's directory: the configured one, that of the given weights, or one built once from `texts`.

    The run keeps a copy, which an export carries over. weights: the directory of given weights; the run's own
    once it has a checkpoint.
    """
    directory = run_dir / TOKENIZER
    given = config.tokenizer.path
    if given is None and weights is not None:
        given = companions_directory(weights)
        if not (given / "tokenizer_config.json").exists():
            raise ConfigError(
                [f"tokenizer.path: {given} has no tokenizer_config.json; name a tokenizer's directory"]
            )
    if given is not None:
        if processes.process_index() == 0:
            copy_companions(Path(given), directory)
        return Path(given)
    if processes.process_index() == 0 and not (directory / "tokenizer.json").exists():
        if texts is None:
            raise ConfigError(
                ["tokenizer.path: missing; this recipe has no texts to build a tokenizer from, name one"]
            )
        task_tokenizer.build(texts(), directory)
    processes.barrier("the tokenizer is built")
    return directory
