"""An experiment, typed. `recipe` names its class; a recipe has only the sections that it reads.

    AsyncGrpoConfig   warm start on worked answers, then asynchronous RL against a rollout fleet
    SftConfig         supervised training
    module:Name       a subclass of `ExperimentConfig` in the user's own file

Sections are beside this file: `model`, `optimization`, `fleet`. Nothing here imports jax or transformers,
so a config is checked in well under a second.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, ValidationInfo, model_validator

from jaxtrain.config.base import (
    NonNegativeInt,
    Reference,
    Section,
    named,
    rejection,
    required,
    section,
    setting,
)
from jaxtrain.config.division import known_sizes, undivided
from jaxtrain.config.fleet import (
    ProcessSection,
    RolloutSection,
    TokenizerSection,
    TrajectorySection,
    WeightSection,
)
from jaxtrain.config.model import MeshSection, ModelSection
from jaxtrain.config.optimization import (
    BatchSection,
    CheckpointSection,
    EvaluationSection,
    FailureSection,
    OptimizerSection,
    PhaseSection,
    RlSection,
    StageSection,
    SupervisedSection,
)

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ExperimentConfig(Section):
    """Fields of every recipe. A recipe is a subclass with its sections, and a function that trains.

    program: `module:function` of that function, called with the config and the run's directory.
    """

    program: ClassVar[str]

    recipe: str = required("which algorithm")
    modules: str | None = setting(
        None,
        "directory of the modules that `module:Name` values name; None is that of the config file",
        resumable=True,
    )
    name: RunName = setting("run", "the run's directory under runs_dir")
    seed: NonNegativeInt = setting(0, "of initialisation, data order and sampling")
    runs_dir: str = setting("runs", "directory of runs, relative to the working directory", resumable=True)
    model: ModelSection = required("architecture and numerics")
    mesh: MeshSection = section(MeshSection, "devices")
    tokenizer: TokenizerSection = section(TokenizerSection, "text to ids")
    optimizer: OptimizerSection = section(OptimizerSection, "Muon and AdamW")
    batch: BatchSection = required("shape of one microbatch")
    checkpoint: CheckpointSection = section(CheckpointSection, "restart points")
    failure: FailureSection = section(FailureSection, "when to give up")

    @property
    def run_dir(self) -> Path:
        """runs/<name>, absolute."""
        return Path(self.runs_dir).absolute() / self.name

    @property
    def phases(self) -> dict[str, PhaseSection]:
        """The phases of the recipe, by field."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, PhaseSection)}

    @property
    def microbatches(self) -> dict[str, BatchSection | StageSection]:
        """Every shape of a microbatch that the recipe trains on, by the field that gives it."""
        staged = {name: getattr(phase, "stages", []) for name, phase in self.phases.items()}
        shapes = {
            f"{name}.stages.{i}": stage for name, stages in staged.items() for i, stage in enumerate(stages)
        }
        return shapes if shapes and all(staged.values()) else {"batch": self.batch} | shapes

    @model_validator(mode="after")
    def _divides(self) -> Self:
        """Checks the given sizes; one of -1 is known only when there are devices, see `training.run`."""
        for field, problem in undivided(self.model, self.microbatches, known_sizes(self.mesh)):
            raise rejection(field, problem)
        return self

    @model_validator(mode="after")
    def _row_fits(self) -> Self:
        path = self.tokenizer.path
        if path is not None and not Path(path).is_dir():
            raise rejection("tokenizer.path", f"{path} is no directory; name a tokenizer's, or null")
        longest = self.model.max_position_embeddings
        if self.batch.sequence_length > longest:
            raise rejection(
                "batch.sequence_length",
                f"{self.batch.sequence_length} is more than model.max_position_embeddings {longest}",
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        for name, phase in self.phases.items():
            if isinstance(phase, SupervisedSection):
                check_stages(name, phase, self.model)
        return self

    @model_validator(mode="after")
    def _clip_has_an_effect(self) -> Self:
        threshold = self.optimizer.muon.qk_clip
        if threshold is not None and self.model.decoder(vocab_size=1).use_qk_norm:
            raise rejection(
                "optimizer.muon.qk_clip",
                f"{threshold:g} has no effect with model.use_qk_norm, which undoes any scale of the q and k "
                "weights and bounds the logits itself; set it to null",
            )
        return self


def check_stages(section: str, phase: SupervisedSection, model: ModelSection) -> None:
    """Rows must fit the model, and the last stage must leave the RoPE base that the model is served with."""
    for index, stage in enumerate(phase.stages):
        if stage.sequence_length > model.max_position_embeddings:
            raise rejection(
                f"{section}.stages.{index}.sequence_length",
                f"{stage.sequence_length} is more than model.max_position_embeddings "
                f"{model.max_position_embeddings}",
            )
    last = phase.stages[-1].rope_theta if phase.stages else None
    if last is not None and last != model.rope_theta:
        raise rejection(
            f"{section}.stages.{len(phase.stages) - 1}.rope_theta",
            f"{last:g} is not model.rope_theta {model.rope_theta:g}, the base that the trained model has; "
            "give the model the last stage's base",
        )


class SftConfig(ExperimentConfig):
    """Supervised training, on the environment's worked answers unless another source is named."""

    program: ClassVar[str] = "jaxtrain.recipes.sft:run"

    environment: Annotated[Reference, named("reasoning_gym")] | None = setting(
        None, "tasks, for a source that reads them", reference="environment"
    )
    sft: SupervisedSection = required("the supervised phase")

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        if self.environment is None and self.sft.source.name == "worked_answers":
            raise rejection("environment", "missing; sft.source worked_answers reads its tasks")
        return self


def store_problem(url: str) -> str:
    """Why processes cannot meet at the URL, "" if they can. Nothing is opened."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "" if os.path.isabs(url) else f"{url} is relative; give an absolute path, or file:///data/run"
    if scheme == "memory":
        return (
            f"{url} is the memory of one process; trainer and fleet are several: use file://, gs:// or s3://"
        )
    if scheme not in ("file", "gs", "s3"):
        return f"{url}: {scheme}:// is not one of file://, gs://, s3://"
    if scheme == "file" and not os.path.isabs(rest):
        return f"{url} is relative; a file URL has an absolute path, as in file:///data/run"
    if not rest.strip("/"):
        return f"{url} names no {'directory' if scheme == 'file' else 'bucket'}"
    return ""


class AsyncGrpoConfig(ExperimentConfig):
    """Warm start, then asynchronous RL: trainer and fleet meet in the store and never wait for each other."""

    program: ClassVar[str] = "jaxtrain.recipes.async_grpo:run"

    environment: Annotated[Reference, named("reasoning_gym")] = setting(
        Reference(name="reasoning_gym"), "tasks, their episodes and rewards", reference="environment"
    )
    store: str | None = setting(
        None, "file://, gs:// or s3:// URL where trainer and fleet meet; None is the run's own directory"
    )
    warm_start: SupervisedSection = required("supervised steps before RL; 0 steps starts from scratch")
    rl: RlSection = required("the reinforcement phase")
    trajectories: TrajectorySection = section(TrajectorySection, "what a step trains on")
    rollouts: RolloutSection = section(RolloutSection, "how completions are made")
    weights: WeightSection = section(WeightSection, "how versions travel")
    evaluation: EvaluationSection = section(EvaluationSection, "reward before and after")
    processes: ProcessSection = section(ProcessSection, "composition on one machine")

    @property
    def store_url(self) -> str:
        """The configured store, or the run's own directory."""
        return self.store if self.store is not None else f"file://{self.run_dir / 'store'}"

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        if self.store is not None and (problem := store_problem(self.store)):
            raise rejection("store", problem)
        heads, groups = self.model.num_attention_heads, self.model.num_key_value_heads
        parallel = self.weights.tensor_parallel
        made_up = (info.context or {}).get("stand_in", False)
        if not made_up and (heads % parallel or (groups % parallel and parallel % groups)):
            raise rejection(
                "weights.tensor_parallel",
                f"{parallel} does not divide the model's {heads} attention heads and {groups} key/value "
                "heads",
            )
        if self.trajectories.length_bins > self.batch.sequence_length:
            raise rejection(
                "trajectories.length_bins",
                f"{self.trajectories.length_bins} is more than batch.sequence_length "
                f"{self.batch.sequence_length}: a bin would hold no length",
            )
        if self.weights.publish_every > self.trajectories.max_lag + 1:
            raise rejection(
                "weights.publish_every",
                f"{self.weights.publish_every} is more than trajectories.max_lag "
                f"{self.trajectories.max_lag} + 1: before the next version no token would be fresh",
            )
        if self.rollouts.capture_routed_experts and self.model.n_routed_experts is None:
            raise rejection(
                "rollouts.capture_routed_experts",
                f"true, and architecture {self.model.architecture!r} has no routed experts; set it to false",
            )
        if self.rollouts.max_tokens >= self.batch.sequence_length:
            raise rejection(
                "rollouts.max_tokens",
                f"{self.rollouts.max_tokens} leaves no room for a prompt in batch.sequence_length "
                f"{self.batch.sequence_length}",
            )
        if self.rollouts.servers_at_once >= max(2, self.rollouts.servers):
            raise rejection(
                "rollouts.servers_at_once",
                f"{self.rollouts.servers_at_once} of rollouts.servers {self.rollouts.servers} would stop the "
                "whole fleet; it must be fewer than all",
            )
        return self


RECIPES: dict[str, type[ExperimentConfig]] = {"async_grpo": AsyncGrpoConfig, "sft": SftConfig}


def as_plain(config: ExperimentConfig) -> dict[str, Any]:
    """Every field with its value, as written to runs/<name>/config.yaml."""
    return config.model_dump(mode="json")
