"""A Hugging Face directory of one version, for an engine that loads from files.

It is written under another name, renamed, and never changed: a server may load from it at any time.
`jaxtrain_version.json` in it names the version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollout_bridge import architectures
from rollout_bridge.files import sync_directory, whole_directory
from rollout_bridge.quantization.host import dequantize_block_fp8
from rollout_bridge.quantization.plan import Format, scale_name
from rollout_bridge.safetensors_files import TensorOutput, write_tensors
from rollout_bridge.weights.read.mirror_view import MirrorView

EngineFormat = Literal["fp8", "bf16"]
STAMP = "jaxtrain_version.json"
SHARD_BYTES = 4 << 30


def materialize(
    view: MirrorView, directory: Path, engine_format: EngineFormat, *, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Writes ``directory/<version>-<incarnation>-<manifest>-<format>/`` and returns it, new or there already.

    engine_format: "fp8" stores the canonical codes and scales with a quantization_config; "bf16" stores the
        dequantised weights, exactly.
    shard_bytes: larger models are split into files of about this size, with an index.
    Raises ValueError for another format, or if a directory of that name holds something else.
    """
    if engine_format not in ("fp8", "bf16"):
        raise ValueError(f"engine_format: {engine_format!r} is not 'fp8' or 'bf16'")
    ref = view.state.ref
    target = directory / f"{ref.version:08d}-{ref.incarnation:06d}-{ref.hash[:12]}-{engine_format}"
    stamp = {
        "run_id": view.run.run_id,
        "version": ref.version,
        "incarnation": ref.incarnation,
        "step": view.state.step,
        "manifest_hash": ref.hash,
        "format": engine_format,
    }
    if target.exists():
        if read_stamp(target) == stamp:
            return target
        raise ValueError(f"{target}: holds something else than {stamp}; remove it")
    with whole_directory(target) as temporary:
        write_tensors(list(_outputs(view, engine_format)), temporary, shard_bytes)
        files = dict(view.run.tokenizer) | {"config.json": json.dumps(_config(view, engine_format), indent=2)}
        for name, text in files.items():
            (temporary / name).write_text(text)
        (temporary / STAMP).write_text(json.dumps(stamp))
        for path in temporary.iterdir():
            path.chmod(0o444)
        sync_directory(temporary)
    return target


def read_stamp(directory: Path) -> dict[str, Any] | None:
    """The version of a materialised directory, as `materialize` wrote it; None for another directory."""
    path = directory / STAMP
    return json.loads(path.read_text()) if path.exists() else None


def _config(view: MirrorView, engine_format: EngineFormat) -> dict[str, Any]:
    ours = ("quantization_config", architectures.REFERENCE)
    config = {key: value for key, value in view.run.hf_config.items() if key not in ours}
    config.setdefault("architectures", [architectures.class_name(view.run.hf_config)])
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    if engine_format == "fp8" and Format.fp8_block in view.run.plan.formats.values():
        config["quantization_config"] = view.run.plan.hf_quantization_config()
    return config


def _outputs(view: MirrorView, engine_format: EngineFormat) -> Iterator[TensorOutput]:
    scales = {
        scale_name(name) for name, chosen in view.run.plan.formats.items() if chosen is Format.fp8_block
    }
    for name, spec in view.specs.items():
        quantized = scale_name(name) in scales
        if engine_format == "bf16" and name in scales:
            continue
        if engine_format == "bf16" and quantized:
            yield TensorOutput(
                name, "BF16", spec.shape, 2 * spec.size, lambda name=name: _dequantized(view, name)
            )
        else:
            yield TensorOutput(name, spec.dtype, spec.shape, spec.nbytes, lambda name=name: view.tensor(name))


def _dequantized(view: MirrorView, name: str) -> np.ndarray:
    scale = view.tensor(scale_name(name)).view(np.float32)
    return dequantize_block_fp8(view.tensor(name), scale, name=name)
