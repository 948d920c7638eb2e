"""`jaxtrain export`: a run's or an imported checkpoint becomes a Hugging Face directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxtrain.commands.common import WRONG_CONFIG, fail, log_to_stderr, naming
from jaxtrain.commands.import_ import Architecture, Destination, search_here
from jaxtrain.huggingface.layout import ExportFormat

if TYPE_CHECKING:
    from rollout_bridge.quantization.plan import ServingLayout

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(
    source: Annotated[
        Path,
        typer.Argument(help="runs/NAME, an imported model, or a Hugging Face directory.", file_okay=False),
    ],
    destination: Destination,
    step: Annotated[
        int | None,
        typer.Option(help="Which of a run's checkpoints. (default: the newest)", show_default=False),
    ] = None,
    format: Annotated[
        ExportFormat, typer.Option("--format", "-f", help="How weights are stored; fp8 in blocks of 128x128.")
    ] = ExportFormat.BF16,
    architecture: Architecture = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, such as 5GB or 500MB.")] = "5GB",
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Ranks of the engine that will serve fp8: its slices are whole blocks.")
    ] = 1,
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel/--no-expert-parallel", help="That engine spreads experts whole over its ranks."
        ),
    ] = True,
    min_fp8_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Refuse an fp8 export with a smaller part of the parameters in FP8."),
    ] = 0.0,
) -> None:
    """Export a checkpoint as a Hugging Face directory that transformers and vLLM load.

    Safetensors of limited size with an index, config.json, and the tokenizer's files. The directory appears
    whole or not at all, and is never overwritten. A run may go on training meanwhile.
    """
    shard_bytes = shard_size(max_shard_size)
    log_to_stderr()
    search_here(architecture)
    from jaxtrain.huggingface.devices import streaming_mesh
    from jaxtrain.huggingface.layout import read_config
    from jaxtrain.training.saved import export_model
    from rollout_bridge.quantization.plan import ServingLayout as Layout
    from sharding import processes
    from sharding.errors import ShardingError

    serving = Layout(tensor_parallel, expert_parallel and tensor_parallel > 1)
    with naming(ShardingError):
        processes.initialize()
        export_model(
            source,
            destination,
            streaming_mesh(read_config(source)),
            step=step,
            architecture=architecture,
            export_format=format,
            serving=serving,
            shard_bytes=shard_bytes,
            min_fp8_share=min_fp8_share,
        )
    print(f"{destination}: exported as {format.value}{_share(destination, serving, format)}")


def _share(directory: Path, serving: ServingLayout, format: ExportFormat) -> str:
    """`, 98.7% of the parameters in FP8 ...` of an FP8 export."""
    if format is not ExportFormat.FP8:
        return ""
    from jaxtrain.huggingface.layout import read_config
    from rollout_bridge import architectures
    from rollout_bridge.quantization.plan import fp8_share, plan_for

    decoder = architectures.read(read_config(directory))
    sources = architectures.tensors(decoder)
    return f", {fp8_share(sources, plan_for(sources, serving=serving, head_dim=decoder.head_dim), serving)}"


def shard_size(text: str) -> int:
    """Bytes of "5GB", "500 MB", "1GiB" or a plain number; ends the command for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        fail(f"--max-shard-size: {text!r} is not a size such as 5GB or 500MB", status=WRONG_CONFIG)
    return size
