"""A model in a jaxtrain directory (see `huggingface.layout`): import, export, and reading it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxtrain.huggingface.checkpoint import HuggingFaceCheckpoint, open_checkpoint
from jaxtrain.huggingface.export import SHARD_BYTES, export
from jaxtrain.huggingface.layout import (
    CHECKPOINTS,
    TOKENIZER,
    ExportFormat,
    check_destination,
    companions_directory,
    copy_companions,
    is_hugging_face,
    read_config,
    write_config,
)
from jaxtrain.huggingface.streaming import load_parameters
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import Definition, define
from jaxtrain.models.sharding_rules import parameter_shardings
from jaxtrain.training.checkpoint import Checkpointer
from jaxtrain.training.checkpoint_reader import CheckpointReader
from rollout_bridge.files import whole_directory
from rollout_bridge.quantization.plan import ServingLayout
from sharding import processes

Parameters = dict[str, jax.Array]


@dataclass(frozen=True)
class SavedModel:
    """A model in a directory of either kind, opened and checked but not read.

    source: where it is. Exactly one of `published` (Hugging Face) and `reader` (jaxtrain) is set.
    """

    source: Path
    hf_config: dict[str, Any]
    published: HuggingFaceCheckpoint | None = None
    reader: CheckpointReader | None = None

    def load(
        self, shapes: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, NamedSharding]
    ) -> Parameters:
        """Parameters and buffers by path, on the shards. All processes of the mesh call it."""
        if self.published is not None:
            return load_parameters(self.published, shapes, shardings)
        assert self.reader is not None
        keys = {path: _key(self.reader, path) for path in shapes}
        like = {
            keys[path]: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=shardings[path])
            for path, shape in shapes.items()
        }
        found = self.reader.restore(like)
        return {path: found[key] for path, key in keys.items()}


def open_model(directory: Path, step: int | None = None, *, architecture: str | None = None) -> SavedModel:
    """Opens either kind of directory; `step` chooses among a run's checkpoints, None is the newest.

    architecture: see `layout.read_config`.

    Raises `HuggingFaceError` or `CheckpointError` with every problem, before memory is allocated.
    """
    if is_hugging_face(directory):
        published = open_checkpoint(directory, architecture)
        return SavedModel(directory, published.hf_config, published=published)
    reader = CheckpointReader(directory / CHECKPOINTS, step)
    config = read_config(directory, architecture)
    return SavedModel(directory, with_base(config, reader.data.get("rope_theta")), reader=reader)


def with_base(hf_config: dict[str, Any], rope_theta: float | None) -> dict[str, Any]:
    """config.json with the base of the rotary embedding that the weights were last trained with.

    A run's config.json has that of its last stage, which it may not have reached.
    """
    if rope_theta is None:
        return hf_config
    found = hf_config | ({"rope_theta": rope_theta} if "rope_theta" in hf_config else {})
    rope = hf_config.get("rope_parameters")
    return found | ({} if rope is None else {"rope_parameters": rope | {"rope_theta": rope_theta}})


def parameter_source(
    model: SavedModel, definition: Definition, shardings: Mapping[str, NamedSharding]
) -> Callable[[str], jax.Array]:
    """Loads one stacked parameter at a time, as an export asks for them."""

    def parameter(path: str) -> jax.Array:
        return model.load({path: definition.shapes[path]}, shardings)[path]

    return parameter


def import_model(source: Path, destination: Path, mesh: Mesh, *, architecture: str | None = None) -> Path:
    """Writes a jaxtrain directory from a Hugging Face one, through the devices of `mesh`, and returns it.

    Raises errors of either directory before memory is allocated. A failure leaves nothing behind. All
    processes of the mesh call it.
    """
    checkpoint = open_checkpoint(source, architecture)
    definition = define(ModelConfig.from_hf(checkpoint.hf_config))
    shardings = parameter_shardings(definition, mesh)
    nbytes = sum(shape.size * shape.dtype.itemsize for shape in definition.shapes.values())
    first = processes.process_index() == 0
    if first:
        check_destination(destination, nbytes=nbytes)
    name = processes.broadcast_json(os.urandom(4).hex() if first else None, name="import")
    partial = destination.absolute().with_name(f".{destination.name}.{name}.partial")
    with whole_directory(destination, partial=partial) if first else nullcontext():
        processes.barrier("import: directory")
        values = load_parameters(checkpoint, definition.shapes, shardings)
        arrays = {
            "params": {path: v for path, v in values.items() if path not in definition.buffers},
            "buffers": {path: v for path, v in values.items() if path in definition.buffers},
        }
        checkpoints = Checkpointer(partial / CHECKPOINTS, keep=1, save_interval_steps=1)
        checkpoints.save(0, arrays, {"source": os.fspath(source.absolute())})
        checkpoints.close()
        if first:
            copy_companions(source, partial / TOKENIZER)
            write_config(partial, checkpoint.hf_config)
    processes.barrier("import: done")
    return destination


def export_model(
    source: Path,
    destination: Path,
    mesh: Mesh,
    *,
    step: int | None = None,
    architecture: str | None = None,
    export_format: ExportFormat = ExportFormat.BF16,
    serving: ServingLayout | None = None,
    shard_bytes: int = SHARD_BYTES,
    min_fp8_share: float = 0.0,
) -> Path:
    """Writes a Hugging Face directory from either kind of directory; see `export.export` and `open_model`."""
    model = open_model(source, step, architecture=architecture)
    definition = define(ModelConfig.from_hf(model.hf_config))
    shardings = parameter_shardings(definition, mesh)
    return export(
        destination,
        model.hf_config,
        parameter_source(model, definition, shardings),
        companions=companions_directory(source),
        export_format=export_format,
        serving=serving,
        shard_bytes=shard_bytes,
        min_fp8_share=min_fp8_share,
    )


def _key(reader: CheckpointReader, path: str) -> str:
    """Path of a parameter in a run's checkpoint: under its part of the state."""
    parts = (part for part in ("buffers", "frozen") if f"{part}/{path}" in reader.shapes)
    return f"{next(parts, 'params')}/{path}"
