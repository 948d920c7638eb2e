"""Builds what trains: a model, its optimizer, the placement of both, and the programs of a loss.

Pure: nothing is read, allocated or compiled here, so commands and benchmarks can build for absent devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxtrain.config.model import MeshSection
from jaxtrain.config.optimization import OptimizerSection
from jaxtrain.data.batch import Column, microbatch_shapes
from jaxtrain.losses.base import Loss
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import Definition, define, initialize
from jaxtrain.models.placement import platform
from jaxtrain.optim.muon import MuonConfig
from jaxtrain.optim.newton_schulz import Algorithm, Normalization, fastest_dtype
from jaxtrain.optim.optimizer import AdamWConfig, Method, OptimizerConfig, build, select
from jaxtrain.optim.qk_clip import QkClip
from jaxtrain.training.programs import Programs, compile_apply, compile_programs
from jaxtrain.training.state import (
    StatePlacement,
    TrainState,
    abstract_state,
    place,
    sharded_shapes,
    state_of,
)
from jaxtrain.training.step import StepInputs, StepMetrics, Sums
from sharding.mesh import MeshSpec


@dataclass(frozen=True)
class Trainable:
    """A model that can be trained on a mesh.

    abstract: shapes of the state. step: the jitted optimizer step, one for every loss.
    """

    definition: Definition
    optimizer: optax.GradientTransformation
    placement: StatePlacement
    abstract: TrainState
    step: Callable[[TrainState, Sums, StepInputs], tuple[TrainState, StepMetrics]]

    def programs(
        self,
        loss: Loss,
        *,
        rows: int,
        sequence_length: int,
        columns: tuple[Column, ...] | None = None,
        definition: Definition | None = None,
        measure_noise: bool = False,
    ) -> Programs:
        """Programs of `loss` for microbatches [rows, sequence_length]; each compiles at its first use.

        columns: of the batch besides the standard ones; None: those that the loss reads. definition: another
        one of the same parameters, for a stage with another rotary base.
        """
        columns = loss.columns if columns is None else columns
        return compile_programs(
            definition or self.definition,
            self.placement,
            self.abstract,
            loss=loss,
            microbatch=microbatch_shapes(columns, rows=rows, sequence_length=sequence_length),
            step=self.step,
            measure_noise=measure_noise,
        )

    @property
    def restorable(self) -> TrainState:
        """Shapes of the state with their shardings: what a checkpoint is restored to."""
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            self.abstract,
            self.placement.state,
        )

    def initial_state(self, *, seed: int, further: Mapping[str, jax.Array] | None = None) -> TrainState:
        """Random parameters and empty optimizer state, each created on its own shard.

        further: the parameters of further models, on their shards.
        """
        where = self.placement.state.model
        values = initialize(self.definition.config, seed=seed, shardings=where)
        return state_of(values | dict(further or {}), self.optimizer, self.placement)


def trainable(
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    optimizer: OptimizerConfig,
    *,
    clip_norm: float,
    qk_clip: float | None = None,
    further: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> Trainable:
    """`model` with its optimizer on `mesh`. Frozen parameters have no gradient and no state.

    clip_norm: largest global gradient norm. qk_clip: largest attention logit, None for no clip. further:
    parameters of further models that losses read, such as a reference, as prefix/path with the model's paths.
    Raises `sharding.ShardingError` for sizes that do not divide, `ValueError` for an override that matches
    nothing.
    """
    definition = define(replace(model, measure_max_logits=qk_clip is not None))
    shapes = sharded_shapes(definition, mesh)
    choices = select(optimizer, shapes)
    frozen = frozenset(path for path, choice in choices.items() if choice.method is Method.frozen)
    transformation = build(optimizer, shapes)
    abstract = abstract_state(definition, transformation, frozen=frozen, further=further)
    placement = place(definition, abstract, mesh)
    return Trainable(
        definition=definition,
        optimizer=transformation,
        placement=placement,
        abstract=abstract,
        step=compile_apply(
            transformation,
            placement,
            clip_norm=clip_norm,
            qk_clip=None if qk_clip is None else clip_of(model, qk_clip),
        ),
    )


def trainable_of(section: OptimizerSection, model: ModelConfig, mesh: Mesh | AbstractMesh) -> Trainable:
    """`trainable` with the optimizer of a config."""
    return trainable(
        model,
        mesh,
        optimizer_config(section, head_dim=model.head_dim, platform=platform(mesh)),
        clip_norm=section.clip_norm,
        qk_clip=section.muon.qk_clip,
    )


def mesh_of(section: MeshSection) -> Mesh:
    """The config's mesh over this machine's devices. Raises `sharding.ShardingError`."""
    return MeshSpec(ici=section.ici.model_dump(), dcn=section.dcn.model_dump()).build()


def clip_of(model: ModelConfig, threshold: float) -> QkClip:
    """The clip of the model's stacks of layers, dense before MoE as in its logits."""
    layers = {"dense": model.first_k_dense_replace, "moe": model.num_moe_layers}
    return QkClip(
        threshold=threshold,
        key_heads=model.num_key_value_heads,
        stacks=tuple((name, count) for name, count in layers.items() if count),
    )


def optimizer_config(section: OptimizerSection, *, head_dim: int, platform: str) -> OptimizerConfig:
    """The optimizer of a model whose attention heads are `head_dim` wide, on devices of `platform`."""
    muon, adamw = section.muon, section.adamw
    iteration_dtype = muon.iteration_dtype
    if iteration_dtype == "auto":
        algorithm = Algorithm(muon.algorithm)
        iteration_dtype = fastest_dtype(platform, algorithm=algorithm, coefficients=muon.coefficients)
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
            iteration_dtype=iteration_dtype,
            split_heads=head_dim if muon.split_heads else None,
        ),
        adamw=AdamWConfig(b1=adamw.b1, b2=adamw.b2, eps=adamw.eps, weight_decay=adamw.weight_decay),
        lm_head=Method.muon if section.lm_head_uses_muon else Method.adamw,
        overrides={pattern: Method(name) for pattern, name in section.overrides.items()},
    )
