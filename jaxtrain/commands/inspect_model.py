"""`jaxtrain inspect model`: parameters, operations and memory of a model, computed without its devices."""

from __future__ import annotations

import json as json_module
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxtrain.commands.common import WRONG_CONFIG, console, fail, load

if TYPE_CHECKING:
    from jaxtrain.config.optimization import OptimizerSection
    from jaxtrain.config.schema import ExperimentConfig
    from jaxtrain.models.config import ModelConfig
    from jaxtrain.models.definition import Definition


def inspect_model(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME_OR_CONFIG",
            help="A preset, an experiment's YAML file, or a Hugging Face config.json or its directory.",
            show_default=False,
        ),
    ],
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="Mesh to lay it over, e.g. fsdp=32,expert=8.")
    ] = None,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", min=1, help="Tokens of a document, for attention's part.")
    ] = 4096,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            "--vocabulary",
            min=1,
            help="Entries of the embedding, if the name has none. (default: 64; of an experiment, its own)",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Ranks of the engine that serves it, for its share in FP8.")
    ] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel/--no-expert-parallel", help="Experts are whole on one rank.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show parameters by part, total and active, operations for each token, and bytes on a mesh's devices.

    Nothing is allocated. Bytes are those of float32 parameters, gradients and optimizer state.
    """
    from jaxtrain.config.optimization import OptimizerSection
    from jaxtrain.models.definition import define
    from jaxtrain.models.inspection import describe

    sizes = _mesh_sizes(mesh)
    try:
        config, optimizer = _model(name, vocabulary)
        definition = define(config)
        found = {
            "model": name,
            "architecture": config.architecture,
            "vocabulary": config.vocab_size,
            **describe(definition, sequence_length=sequence_length),
        }
        found["fp8"] = _fp8(config, tensor_parallel, expert_parallel and tensor_parallel > 1)
        if sizes:
            found["mesh"] = sizes
            found["bytes_per_device"] = _memory(definition, optimizer or OptimizerSection(), sizes)
    except ValueError as error:  # of the model, of the mesh, or of a value that neither can use
        fail(f"{name}: {error}", status=WRONG_CONFIG)
    if json:
        print(json_module.dumps(found, indent=2))
    else:
        _show(found)


def _fp8(config: ModelConfig, tensor_parallel: int, expert_parallel: bool) -> dict[str, Any]:
    """What an engine of that layout holds in FP8."""
    from rollout_bridge import architectures
    from rollout_bridge.quantization.plan import ServingLayout, fp8_share, plan_for

    serving = ServingLayout(tensor_parallel, expert_parallel)
    sources = architectures.tensors(config)
    share = fp8_share(sources, plan_for(sources, serving=serving, head_dim=config.head_dim), serving)
    return {
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "share": share.share,
        "refused": share.refused,
        "text": str(share),
    }


def _vocabulary(experiment: ExperimentConfig) -> int:
    """Rows of the embedding that a start of the experiment makes; builds its tokenizer if none is given."""
    import tempfile

    from transformers import AutoTokenizer

    from jaxtrain.data.environments import open_environment
    from jaxtrain.data.tokenizer import build, prompts_of
    from jaxtrain.training.start import vocabulary_size

    saved = experiment.run_dir / "config.json"
    given = experiment.model.checkpoint
    for path in (saved, *([Path(given) / "config.json"] if given is not None else [])):
        if path.is_file():
            return int(json_module.loads(path.read_text(encoding="utf-8"))["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = experiment.tokenizer.path
        if tokenizer is None:
            if getattr(experiment, "environment", None) is None:
                return 64
            tokenizer = str(build(prompts_of(open_environment(experiment)), Path(directory)))
        return vocabulary_size(len(AutoTokenizer.from_pretrained(tokenizer)), None, None)


def _model(name: str, vocabulary: int | None) -> tuple[ModelConfig, OptimizerSection | None]:
    """The decoder that `name` means, and the optimizer of an experiment."""
    from jaxtrain.config.model import ModelSection
    from jaxtrain.config.presets import MODEL_PRESETS, PRESET_ALIASES, PUBLISHED_VOCABULARIES
    from jaxtrain.models.config import ModelConfig
    from rollout_bridge.errors import guess

    preset = PRESET_ALIASES.get(name, name)
    if preset in MODEL_PRESETS:
        size = vocabulary or PUBLISHED_VOCABULARIES.get(preset, 64)
        return ModelConfig.of(ModelSection.model_validate({"preset": preset}).decoder(vocab_size=size)), None
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        fail(
            f"{name}: neither a preset ({', '.join(MODEL_PRESETS)}) nor a file; name a preset, an "
            "experiment's YAML file or a Hugging Face config.json"
            f"{guess(name, [*MODEL_PRESETS, *PRESET_ALIASES])}",
            status=WRONG_CONFIG,
        )
    if path.suffix == ".json":
        try:
            given = json_module.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            fail(f"{path}: not JSON: {error}", status=WRONG_CONFIG)
        if not isinstance(given, dict):
            fail(
                f"{path}: holds {type(given).__name__}, expected an object; name a Hugging Face config.json",
                status=WRONG_CONFIG,
            )
        return ModelConfig.from_hf(given | ({"vocab_size": vocabulary} if vocabulary else {})), None
    experiment = load(path, None, None)
    model = experiment.model
    return ModelConfig.of(
        model.decoder(vocab_size=vocabulary or _vocabulary(experiment)), **model.numerics
    ), experiment.optimizer


def _mesh_sizes(text: str | None) -> dict[str, int]:
    from jaxtrain.config.model import MeshAxes

    known, sizes = list(MeshAxes.model_fields), {}
    for item in (text or "").split(",") if text else []:
        axis, _, size = item.strip().partition("=")
        if axis not in known or not size.isdigit() or int(size) < 1:
            fail(
                f"--mesh: {item!r} is not an axis ({', '.join(known)}) = a positive number of devices",
                status=WRONG_CONFIG,
            )
        sizes[axis] = int(size)
    return sizes


def _memory(definition: Definition, section: OptimizerSection, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes of one device, each part laid out as training lays it out."""
    from jaxtrain.models.inspection import bytes_on_device
    from jaxtrain.training.build import trainable_of
    from sharding.mesh import MeshSpec

    mesh = MeshSpec(ici=sizes).abstract(math.prod(sizes.values()))
    built = trainable_of(section, definition.config, mesh)
    state, where = built.abstract, built.placement.state
    trained = bytes_on_device(state.params, where.params)
    fixed = bytes_on_device({**state.frozen, **state.buffers}, {**where.frozen, **where.buffers})
    found = {
        "parameters": trained + fixed,
        "gradients": trained,
        "optimizer": bytes_on_device(state.optimizer, where.optimizer),
    }
    return found | {"total": sum(found.values())}


def _show(found: dict[str, Any]) -> None:
    from rich.table import Column, Table

    shown, parameters, flops = console(), found["parameters"], found["flops_per_token"]
    table = Table(
        "part",
        Column("parameters", justify="right"),
        Column("active", justify="right"),
        title=f"{found['model']} ({found['architecture']}, vocabulary {found['vocabulary']})",
        title_justify="left",
    )
    for part, counts in parameters["parts"].items():
        table.add_row(part, f"{counts['held']:,}", f"{counts['active']:,}")
    table.add_section()
    table.add_row("total", f"{parameters['total']:,}", f"{parameters['active']:,}")
    table.add_row("without embedding, head, MTP", f"{parameters['body']:,}", f"{parameters['body_active']:,}")
    shown.print(table)
    layout = found["fp8"]
    shown.print(f"served by {layout['tensor_parallel']} ranks: {layout['text']}")
    shown.print(
        f"operations a token, at {found['sequence_length']} tokens: "
        f"training {flops['training']:.4g}, inference {flops['inference']:.4g}"
    )
    if "mesh" in found:
        axes = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
        shares = ", ".join(
            f"{part} {size / 2**30:.2f} GiB" for part, size in found["bytes_per_device"].items()
        )
        shown.print(f"on each device of {axes}: {shares}")
