"""A Hugging Face directory checked against the model of its config.json, before memory is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.huggingface.errors import HuggingFaceError
from jaxtrain.huggingface.headers import StoredTensor, read_headers
from jaxtrain.huggingface.layout import is_hugging_face, read_config
from jaxtrain.huggingface.reading import BLOCK, READABLE, dequantize_rows, read_rows
from rollout_bridge import architectures
from rollout_bridge.architectures import ArchitectureError, TensorSource
from rollout_bridge.quantization.host import scale_shape
from rollout_bridge.quantization.plan import scale_name

log = logging.getLogger(__name__)

NEXT_TOKEN_LAYERS = "num_nextn_predict_layers"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED = (".rotary_emb.inv_freq",)  # older exports store what is computed from rope_theta
LISTED = 20  # problems of one kind that are printed
_COMPARED = 1 << 24  # bytes at a time


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """A checked directory.

    hf_config: its config.json without quantization_config, as the weights are after reading.
    sources: which slice of which parameter each tensor is.
    """

    directory: Path
    hf_config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    sources: tuple[TensorSource, ...]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor as BF16, F16 or F32 numbers; FP8 ones are dequantised to float32."""
        tensor = self.tensors[name]
        if tensor.dtype == "F8_E4M3":
            return dequantize_rows(tensor, self.tensors[scale_name(name)], start, stop)
        return read_rows(tensor, start, stop)


def open_checkpoint(directory: Path, architecture: str | None = None) -> HuggingFaceCheckpoint:
    """Reads config.json and headers, and compares them. architecture: see `layout.read_config`.

    Raises `HuggingFaceError` with every problem: unsupported values of config.json, files that are missing or
    truncated, tensors that are missing, too many, of another shape or of another dtype.
    """
    headers = read_headers(directory)
    config = _as_stored(read_config(directory, architecture), headers.tensors)
    quantization = config.pop("quantization_config", None)
    decoder, unsupported = architectures.examine(config)
    problems = _quantization_problems(quantization)
    problems += [f"config.json: {line}" for line in unsupported]
    sources = () if decoder is None else architectures.tensors(decoder)
    problems += headers.problems
    if decoder is not None and headers.tensors:
        repeated = architectures.duplicates(decoder)
        if config.get("tie_word_embeddings"):
            repeated = {name: EMBEDDING if first == HEAD else first for name, first in repeated.items()}
        problems += _tensor_problems(
            sources, headers.tensors, quantized=quantization is not None, repeated=repeated
        )
        if not problems:
            problems += _unlike(repeated, headers.tensors)
    if not problems and config.get("tie_word_embeddings") and HEAD in headers.tensors:
        problems += _untied(headers.tensors[EMBEDDING], headers.tensors[HEAD])
    if problems:
        raise HuggingFaceError(directory, problems)
    return HuggingFaceCheckpoint(directory, config, headers.tensors, sources)


def read_model_config(directory: Path, architecture: str | None = None) -> dict[str, Any]:
    """config.json of either kind of directory, without MTP layers that no file has.

    architecture: see `layout.read_config`. Raises `HuggingFaceError` for a config.json that cannot be read;
    errors of the other files are `open_checkpoint`'s.
    """
    config = read_config(directory, architecture)
    if not config.get(NEXT_TOKEN_LAYERS) or not is_hugging_face(directory):
        return config
    return _as_stored(config, read_headers(directory).tensors)


def _as_stored(config: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """`config` without MTP layers, if the files have every other tensor and none of theirs.

    transformers 5 does not save these layers but leaves their number in config.json.
    """
    if not config.get(NEXT_TOKEN_LAYERS):
        return config
    without = config | {NEXT_TOKEN_LAYERS: 0}
    try:
        model, other = architectures.read(config), architectures.read(without)
    except ArchitectureError:
        return config  # the caller reports it with its other problems
    everything = {source.name for source in architectures.tensors(model)} | architectures.duplicates(
        model
    ).keys()
    others = {source.name for source in architectures.tensors(other)}
    if not others <= tensors.keys() or tensors.keys() & (everything - others):
        return config
    log.warning(
        "%s of config.json is %s and no file has such a layer: read as a model without them",
        NEXT_TOKEN_LAYERS,
        config[NEXT_TOKEN_LAYERS],
    )
    return without


def _quantization_problems(quantization: Mapping[str, Any] | None) -> list[str]:
    if quantization is None:
        return []
    expected = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    found = {"fmt": "e4m3", "weight_block_size": None} | dict(quantization)
    return [
        f"config.json: quantization_config.{key}: {found.get(key)!r} is not supported, expected {value!r}; "
        "use the BF16 checkpoint of this model"
        for key, value in expected.items()
        if found.get(key) != value
    ]


def _tensor_problems(
    sources: tuple[TensorSource, ...],
    tensors: Mapping[str, StoredTensor],
    *,
    quantized: bool,
    repeated: Mapping[str, str],
) -> list[str]:
    missing, wrong = [], []
    for source in sources:
        tensor = tensors.get(source.name)
        if tensor is None:
            missing.append(f"{source.name}: missing; the model has it with shape {list(source.shape)}")
            continue
        if tensor.shape != source.shape:
            wrong.append(f"{source.name}: shape {list(tensor.shape)}, expected {list(source.shape)}")
        if tensor.dtype == "F8_E4M3" and quantized and len(tensor.shape) == 2:
            wrong += _scale_problems(tensor, tensors)
        elif tensor.dtype not in READABLE:
            wrong.append(f"{source.name}: dtype {tensor.dtype}, expected {_allowed(quantized)}")
    known = {source.name for source in sources} | repeated.keys()
    known |= {scale_name(name) for name in known if name in tensors and tensors[name].dtype == "F8_E4M3"}
    head_is_embedding = HEAD not in known  # tied; compared with it afterwards
    extra = [
        f"{name}: not a tensor of this model (found {tensor.dtype}{list(tensor.shape)} in {tensor.file.name})"
        for name, tensor in sorted(tensors.items())
        if name not in known and not name.endswith(IGNORED) and not (name == HEAD and head_is_embedding)
    ]
    return [line for lines in (missing, wrong, extra) for line in _shortened(lines)]


def _scale_problems(tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> list[str]:
    name, expected = scale_name(tensor.name), scale_shape(tensor.shape)
    scale = tensors.get(name)
    if scale is None:
        return [f"{name}: missing; {tensor.name} is FP8 and needs scales of shape {list(expected)}"]
    if scale.shape != expected or scale.dtype not in ("F32", "BF16"):
        return [f"{name}: {scale.dtype}{list(scale.shape)}, expected F32{list(expected)}"]
    return []


def _allowed(quantized: bool) -> str:
    readable = " or ".join(READABLE)
    if quantized:
        return f"{readable}, or F8_E4M3 of a matrix"
    return f"{readable}; FP8 needs a quantization_config in config.json"


def _shortened(lines: list[str]) -> list[str]:
    return lines[:LISTED] + ([f"and {len(lines) - LISTED} more like the last"] if len(lines) > LISTED else [])


def _unlike(repeated: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Tensors that a checkpoint repeats must equal the original, which alone is read."""
    return [
        f"{name}: differs from {first}, which it repeats and which is read in its place; delete {name}, or "
        f"set {NEXT_TOKEN_LAYERS} to 0 and delete the layer's tensors"
        for name, first in repeated.items()
        if name in tensors and not _same_bytes(tensors[name], tensors[first])
    ]


def _untied(embedding: StoredTensor, head: StoredTensor) -> list[str]:
    """With tie_word_embeddings, head and embedding must be equal if a file holds both."""
    if _same_bytes(embedding, head):
        return []
    return [
        f"{HEAD}: differs from {EMBEDDING} though config.json has tie_word_embeddings true; set it to false"
    ]


def _same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether shape, dtype and every byte agree; reads a part at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    rows = max(1, _COMPARED * first.shape[0] // max(first.nbytes, 1))
    return all(
        np.array_equal(
            read_rows(first, start, min(start + rows, first.shape[0])).view(np.uint8),
            read_rows(second, start, min(start + rows, first.shape[0])).view(np.uint8),
        )
        for start in range(0, first.shape[0], rows)
    )
