"""What every recipe opens before its first step.

Devices, tasks, tokenizer, model, optimizer, checkpoints, metrics.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import optax
from transformers import AutoTokenizer

from jaxtrain.config.division import undivided
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.model import MeshSection
from jaxtrain.config.optimization import OptimizerSection
from jaxtrain.config.schema import ExperimentConfig
from jaxtrain.data import tokenizer as task_tokenizer
from jaxtrain.huggingface.layout import (
    TOKENIZER,
    companions_directory,
    copy_companions,
    read_config,
    write_config,
)
from jaxtrain.huggingface.saved import SavedModel, open_model
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import Definition, define
from jaxtrain.optim.muon import MuonConfig
from jaxtrain.optim.newton_schulz import Algorithm, Normalization
from jaxtrain.optim.optimizer import AdamWConfig, Method, OptimizerConfig, build
from jaxtrain.optim.qk_clip import QkClip
from jaxtrain.training.checkpoint import Checkpointer
from jaxtrain.training.metrics import MetricsWriter
from jaxtrain.training.step import StepInputs, StepMetrics, Sums, TrainState
from jaxtrain.training.trainer import (
    Placement,
    compile_apply,
    initial_state,
    place,
    sharded_shapes,
    state_of,
)
from rollout_bridge.rollouts.environments import registry as environments
from rollout_bridge.rollouts.environments.base import Environment
from sharding import processes
from sharding.mesh import MeshSpec

log = logging.getLogger(__name__)

VOCABULARY_MULTIPLE = 64  # an unaligned head was seen to run three times slower
TOKENIZER_PROMPTS = 1000  # enough to tell a task's template words from its content


class Stopped(Exception):
    """A signal asked the run to stop; everything trained so far is in a checkpoint."""


class TooManyNonFinite(RuntimeError):
    """More steps than failure.max_nonfinite_steps had a non-finite loss or gradient."""


@dataclass(frozen=True)
class Progress:
    """Where a run is; the JSON item of its checkpoints.

    step: optimizer steps of all phases. supervised_steps, rl_steps: of each. *_tokens: valid tokens trained
    on in each phase, which its schedules are functions of. position: in the worked answers. nonfinite: steps
    skipped.
    """

    step: int = 0
    supervised_steps: int = 0
    supervised_tokens: int = 0
    position: int = 0
    rl_steps: int = 0
    rl_tokens: int = 0
    nonfinite: int = 0

    @property
    def tokens_seen(self) -> int:
        return self.supervised_tokens + self.rl_tokens


@dataclass
class Context:
    """Everything opened. `stop` is set by SIGTERM and SIGINT."""

    config: ExperimentConfig
    environment: Environment
    tokenizer: Any
    tokenizer_dir: Path
    hf_config: dict[str, Any]
    definition: Definition
    optimizer: optax.GradientTransformation
    placement: Placement
    step: Callable[[TrainState, Sums, StepInputs], tuple[TrainState, StepMetrics]]
    checkpoints: Checkpointer
    metrics: MetricsWriter
    stop: threading.Event
    start: SavedModel | None = None  # weights that a new run begins with

    def restore_or_initialize(self) -> tuple[TrainState, Progress]:
        """The newest checkpoint, or the weights of `model.checkpoint`, or random ones."""
        step = self.checkpoints.latest()
        if step is None and self.start is not None:
            shardings = {**self.placement.state.params, **self.placement.state.buffers}
            values = self.start.load(self.definition.shapes, shardings)
            log.info("starting from the weights in %s", self.start.source)
            return state_of(values, self.optimizer, self.placement), Progress()
        state = initial_state(self.definition, self.optimizer, self.placement, seed=self.config.seed)
        if step is None:
            return state, Progress()
        restored = self.checkpoints.restore(step, state)
        log.info("restored step %d from %s", step, self.checkpoints.directory)
        return restored.arrays, Progress(**restored.data)

    def save(self, state: TrainState, progress: Progress, *, force: bool = False) -> None:
        self.checkpoints.save(progress.step, state, asdict(progress), force=force)

    def agree_to_stop(self) -> None:
        """Sets `stop` in every process if a signal has reached one. All call it, at the same step."""
        if processes.any_of(self.stop.is_set(), name="stop"):
            self.stop.set()

    def stop_if_asked(self, state: TrainState, progress: Progress) -> None:
        """Raises `Stopped` after a last checkpoint if a signal arrived."""
        if self.stop.is_set():
            self.save(state, progress, force=True)
            self.checkpoints.wait()
            raise Stopped(f"stopped after step {progress.step}; the same command resumes there")

    def count_nonfinite(self, progress: Progress, *, finite: bool) -> Progress:
        """Raises `TooManyNonFinite` past the limit."""
        if finite:
            return progress
        limit = self.config.failure.max_nonfinite_steps
        log.warning("step %d skipped: its loss or gradient is not finite", progress.step)
        if progress.nonfinite + 1 > limit:
            raise TooManyNonFinite(
                f"step {progress.step}: {progress.nonfinite + 1} steps had a non-finite loss or gradient, "
                f"more than failure.max_nonfinite_steps {limit}; lower the learning rate, or look at the "
                "data of this step"
            )
        return replace(progress, nonfinite=progress.nonfinite + 1)

    def close(self) -> None:
        self.checkpoints.close()
        self.metrics.close()


def open_context(config: ExperimentConfig, run_dir: Path) -> Context:
    """Opens everything; what cannot work fails here, before the first step."""
    processes.initialize()
    mesh = mesh_spec(config.mesh).build()
    if problems := undivided(config.model, config.microbatches, mesh.shape):
        raise ConfigError([f"{field}: {problem}" for field, problem in problems])
    environment = environments.create(config.environment.name, config.environment.arguments(seed=config.seed))
    checkpoints = Checkpointer(
        run_dir / "checkpoints",
        keep=config.checkpoint.keep,
        save_interval_steps=config.checkpoint.every_steps,
    )
    given = Path(config.model.checkpoint) if config.model.checkpoint is not None else None
    if given is not None and checkpoints.latest() is not None:
        given = run_dir  # what it began with is in it now: the directory named may be gone
    start = None
    if given is not None and given != run_dir:
        start = open_model(given, architecture=config.model.architecture)
    tokenizer_dir = ensure_tokenizer(config, environment, run_dir, given)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    given_config = start.hf_config if start is not None else read_config(run_dir) if given else None
    hf_config = hf_config_of(config, tokenizer, given_config, given)
    model = ModelConfig.from_hf(hf_config, **config.model.numerics)
    qk_clip = qk_clip_of(config.optimizer, model)
    definition = define(replace(model, measure_max_logits=qk_clip is not None))
    optimizer = build(
        optimizer_config(config.optimizer, head_dim=model.head_dim), sharded_shapes(definition, mesh)
    )
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    placement = place(definition, optimizer, mesh)
    if processes.process_index() == 0:
        write_config(run_dir, hf_config)  # what `jaxtrain export` reads beside the checkpoints
    return Context(
        config=config,
        environment=environment,
        tokenizer=tokenizer,
        tokenizer_dir=tokenizer_dir,
        hf_config=hf_config,
        definition=definition,
        optimizer=optimizer,
        placement=placement,
        step=compile_apply(optimizer, placement, clip_norm=config.optimizer.clip_norm, qk_clip=qk_clip),
        checkpoints=checkpoints,
        metrics=MetricsWriter(
            run_dir if processes.process_index() == 0 else None, restored_step=checkpoints.latest()
        ),
        stop=stop,
        start=start,
    )


def hf_config_of(
    config: ExperimentConfig, tokenizer: Any, given: dict[str, Any] | None, directory: Path | None
) -> dict[str, Any]:
    """config.json of the run: the model section's, the vocabulary, and the special tokens' ids.

    given, directory: config.json of given weights and where it is. Their special tokens, of which several may
    end an answer, count before the tokenizer's; those of generation_config.json before config.json's.
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
    config: ExperimentConfig, environment: Environment, run_dir: Path, weights: Path | None
) -> Path:
    """A tokenizer's directory: the configured one, that of the given weights, or one built once from the
    environment's training prompts. The run keeps a copy, which an export carries over.

    weights: the directory of given weights; the run's own once it has a checkpoint.
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
        count = min(environment.size, TOKENIZER_PROMPTS)
        prompts = (m["content"] for i in range(count) for m in environment.task(i).messages)
        task_tokenizer.build(prompts, directory)
    processes.barrier("the tokenizer is built")
    return directory


def mesh_spec(section: MeshSection) -> MeshSpec:
    return MeshSpec(ici=section.ici.model_dump(), dcn=section.dcn.model_dump())


def qk_clip_of(section: OptimizerSection, model: ModelConfig) -> QkClip | None:
    """The clip of the model's stacks of layers, dense before MoE as its logits come; None if switched off."""
    if section.muon.qk_clip is None:
        return None
    layers = {"dense": model.first_k_dense_replace, "moe": model.num_moe_layers}
    return QkClip(
        threshold=section.muon.qk_clip,
        key_heads=model.num_key_value_heads,
        stacks=tuple((name, count) for name, count in layers.items() if count),
    )


def optimizer_config(section: OptimizerSection, *, head_dim: int) -> OptimizerConfig:
    """The optimizer of a model whose attention heads are `head_dim` wide."""
    muon, adamw = section.muon, section.adamw
    return OptimizerConfig(
        muon=MuonConfig(
            momentum=muon.momentum,
            nesterov=muon.nesterov,
            newton_schulz_steps=muon.newton_schulz_steps,
            coefficients=muon.coefficients,
            algorithm=Algorithm(muon.algorithm),
            normalization=Normalization(muon.normalization),
            update_rms=muon.update_rms,
            weight_decay=muon.weight_decay,
            momentum_dtype=muon.momentum_dtype,
            iteration_dtype=muon.iteration_dtype,
            split_heads=head_dim if muon.split_heads else None,
        ),
        adamw=AdamWConfig(b1=adamw.b1, b2=adamw.b2, eps=adamw.eps, weight_decay=adamw.weight_decay),
        lm_head=Method.muon if section.lm_head_uses_muon else Method.adamw,
        overrides={pattern: Method(name) for pattern, name in section.overrides.items()},
    )
