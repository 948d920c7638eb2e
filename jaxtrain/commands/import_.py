"""`jaxtrain import`: a Hugging Face directory becomes one that a run can start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxtrain.commands.common import log_to_stderr, naming

Source = Annotated[
    Path,
    typer.Argument(help="A Hugging Face directory: config.json, safetensors, tokenizer.", file_okay=False),
]
Architecture = Annotated[
    str | None,
    typer.Option(
        help="Family of your own: module:Name of a file in this directory. (default: the model_type)",
        show_default=False,
    ),
]
Destination = Annotated[Path, typer.Argument(help="A new directory; it must not be there yet.")]


def search_here(architecture: str | None) -> None:
    """Lets the module of an architecture on the command line be in the current directory."""
    from rollout_bridge.references import search_path

    if architecture is not None:
        search_path(Path.cwd())


def import_(
    source: Source,
    destination: Destination,
    architecture: Architecture = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check config.json, headers and file sizes.")
    ] = False,
) -> None:
    """Import a Hugging Face checkpoint: BF16, F16, F32, or FP8 in blocks of 128x128.

    The tensors stream onto the devices of this host (or, under a coordinator, of all hosts), as many as
    divide hidden_size, and are saved as a checkpoint, with config.json and the tokenizer beside it.
    Everything that does not fit the model is reported at once, before memory is allocated.

    A recipe can also start from SOURCE itself: `model.checkpoint: SOURCE`.
    """
    log_to_stderr()
    search_here(architecture)
    from jaxtrain.huggingface.checkpoint import open_checkpoint

    if check:
        with naming():
            checkpoint = open_checkpoint(source, architecture)
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        kind, count = checkpoint.hf_config["model_type"], len(checkpoint.tensors)
        print(f"{source}: ok ({kind}, {count} tensors, {size:,} bytes)")
        return
    from jaxtrain.huggingface.devices import streaming_mesh
    from jaxtrain.huggingface.layout import read_config
    from jaxtrain.training.saved import import_model
    from sharding import processes
    from sharding.errors import ShardingError

    with naming(ShardingError):
        processes.initialize()
        import_model(source, destination, streaming_mesh(read_config(source)), architecture=architecture)
    print(f"{destination}: imported; start from it with model.checkpoint={destination}")
