"""What a phase trains with, as functions of the tokens it has seen: scheduled values, batch size, stage.

All are evaluated on the host before a step, so they are exact at every boundary, a resumed run takes the
values that an uninterrupted one takes, and no program is compiled again for them; but a stage has programs of
its own, because its shapes and its rotary base are constants of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtrain.config.optimization import BatchSection, Phase, Ramp, Schedule, SupervisedPhase
from jaxtrain.config.tokens import rate_steps
from jaxtrain.models.definition import Definition, define
from jaxtrain.optim import schedules
from jaxtrain.optim.batch_ramp import BatchRamp, SteppedBatch


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


def scheduled_values(phase: Phase) -> Callable[[int], ScheduledValues]:
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
    """The schedule of tokens seen in its phase."""
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


def stages(phase: SupervisedPhase, batch: BatchSection, definition: Definition) -> tuple[Stage, ...]:
    """The phase's stages in order; without any, one of the batch section's shape."""
    if not phase.stages:
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
        for stage in phase.stages
    )


def stage_at(found: tuple[Stage, ...], tokens: int) -> Stage:
    """The stage of the step that follows `tokens` tokens: the last that starts at or before them."""
    return next(stage for stage in reversed(found) if tokens >= stage.start)
