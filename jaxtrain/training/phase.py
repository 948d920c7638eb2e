"""A phase: its data, its loss, and its settings as functions of the tokens it has seen.

Scheduled values, batch size and stage are evaluated on the host before a step, so they are exact at every
boundary, and a resumed run uses the values of an uninterrupted one. They are arguments of the programs and
compile nothing. Each stage has its own programs, because its shapes and its rotary base are constants in
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtrain.config.optimization import BatchSection, PhaseSection, Ramp, Schedule, StageSection
from jaxtrain.config.references import check_columns
from jaxtrain.config.tokens import rate_steps
from jaxtrain.data.batch import Column
from jaxtrain.data.sources.base import BatchShape, OpenBatches
from jaxtrain.losses.base import Loss
from jaxtrain.models.definition import Definition, define
from jaxtrain.optim import schedules
from jaxtrain.optim.batch_ramp import BatchRamp, SteppedBatch
from jaxtrain.training.progress import Progress
from jaxtrain.training.state import TrainState


@dataclass(frozen=True)
class ScheduledValues:
    """Values of one step."""

    learning_rate: float
    router_bias_rate: float
    balance_weight: float
    mtp_weight: float


@dataclass(frozen=True)
class Stage:
    """From `start` tokens on: microbatches [rows, sequence_length] and a definition with its RoPE base."""

    start: int
    rows: int
    sequence_length: int
    definition: Definition

    @property
    def microbatch_tokens(self) -> int:
        return self.rows * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class Phase:
    """All that differs between supervised, preference and RL phases (contract 6).

    name: in the progress and the metrics. batches: opens the data. columns: of its batches besides the
    standard ones. filled: names of the columns that the data has. stages: ascending, the first from 0 tokens.
    before: later phases; once one of them has begun, this one cannot continue. before_step: called with the
    progress before each step. after_step: called after it, with the step's values; its result is added to
    the metrics.

    Raises `ConfigError` for a column that the data does not fill.
    """

    name: str
    section: PhaseSection
    loss: Loss
    batches: OpenBatches
    columns: tuple[Column, ...]
    filled: frozenset[str]
    stages: tuple[Stage, ...]
    before: tuple[str, ...] = ()
    before_step: Callable[[Progress], None] = lambda progress: None
    after_step: Callable[[TrainState, Progress, Mapping[str, float]], Mapping[str, float]] = (
        lambda state, progress, values: {}
    )

    def __post_init__(self) -> None:
        check_columns(self.columns, self.filled, where=f"{self.name}.loss")

    def shape_at(self, tokens: int) -> BatchShape:
        """Shape of the batch after `tokens` tokens of the phase."""
        stage = stage_at(self.stages, tokens)
        ramp = batch_ramp(self.section.batch, microbatch_tokens=stage.microbatch_tokens)
        return BatchShape(ramp.microbatches(tokens), stage.rows, stage.sequence_length)


def scheduled_values(phase: PhaseSection) -> Callable[[int], ScheduledValues]:
    """The phase's values for the step that follows a number of tokens."""
    learning = learning_rate(phase.learning_rate)
    bias, balance, mtp = (
        stepwise(value) for value in (phase.router_bias_rate, phase.aux_loss_weight, phase.mtp_weight)
    )
    return lambda tokens: ScheduledValues(
        learning_rate=learning(tokens),
        router_bias_rate=bias(tokens),
        balance_weight=balance(tokens),
        mtp_weight=mtp(tokens),
    )


def learning_rate(section: Schedule) -> schedules.Schedule:
    """The schedule, a function of tokens seen in its phase."""
    return schedules.named(
        section.kind,
        peak=section.peak,
        final=section.final,
        warmup_tokens=section.warmup_tokens,
        total_tokens=section.total_tokens,
        decay_tokens=section.decay_tokens,
    )


def stepwise(value: float | str) -> schedules.Schedule:
    """A `Rate` field: one number, or "0: 0.001, 15T: 0"."""
    steps = rate_steps(value)
    return schedules.piecewise([number for _, number in steps], [start for start, _ in steps[1:]])


def batch_ramp(section: Ramp, *, microbatch_tokens: int) -> BatchRamp | SteppedBatch:
    """The batch size in microbatches, a line or steps."""
    if section.steps is not None:
        return SteppedBatch(steps=section.sizes, microbatch_tokens=microbatch_tokens)
    return BatchRamp(
        start_tokens=section.first_tokens,
        end_tokens=section.last_tokens,
        ramp_tokens=section.ramp_tokens,
        microbatch_tokens=microbatch_tokens,
    )


def stages(
    sections: Sequence[StageSection], batch: BatchSection, definition: Definition
) -> tuple[Stage, ...]:
    """The stages of a phase in order; without any, one of the batch section's shape."""
    if not sections:
        return (Stage(0, batch.rows, batch.sequence_length, definition),)
    return tuple(
        Stage(
            stage.tokens,
            stage.rows,
            stage.sequence_length,
            definition
            if stage.rope_theta is None
            else define(replace(definition.config, rope_theta=stage.rope_theta)),
        )
        for stage in sections
    )


def stage_at(found: tuple[Stage, ...], tokens: int) -> Stage:
    """The stage of the step that follows `tokens` tokens: the last that starts at or before them."""
    return next(stage for stage in reversed(found) if tokens >= stage.start)
