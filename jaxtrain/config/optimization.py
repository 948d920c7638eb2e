"""Sections of training: batch, schedules, optimizer, and the phases that use them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jaxtrain.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Reference,
    Section,
    named,
    rejection,
    required,
    section,
    setting,
)
from jaxtrain.config.tokens import BatchSteps, PositiveTokens, Rate, Tokens, parse_batch, parse_steps

Momentum = Annotated[float, Field(ge=0, lt=1)]


class Schedule(Section):
    """A learning rate as a function of tokens seen in its phase. Tokens may be written 16M, 500B, 15T.

    Linear from 0 to `peak` over `warmup_tokens`; then constant, or down to `final` at `total_tokens` along a
    cosine, a line, or (wsd) flat until the last `decay_tokens`.
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = setting(
        "constant", "needs no end to be known; GLM-4.5 found cosine better than wsd for pre-training"
    )
    peak: PositiveFloat = required("largest learning rate")
    final: NonNegativeFloat = setting(0.0, "learning rate at total_tokens; unused by constant")
    warmup_tokens: Tokens = setting(0, "linear warm-up from 0")
    total_tokens: PositiveTokens | None = setting(None, "where `final` is reached; required unless constant")
    decay_tokens: PositiveTokens | None = setting(
        None, "length of the final decay; required by wsd, unused elsewhere"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind != "constant" and self.total_tokens is None:
            raise rejection("total_tokens", f"missing; kind {self.kind} reaches `final` there")
        if self.kind == "wsd" and self.decay_tokens is None:
            raise rejection("decay_tokens", "missing; kind wsd needs the length of its final decay")
        if self.kind != "wsd" and self.decay_tokens is not None:
            raise rejection(
                "decay_tokens", f"{self.decay_tokens} is not read by kind {self.kind}, only by wsd"
            )
        if self.final > self.peak:
            raise rejection("final", f"{self.final} is above peak {self.peak}")
        falling = self.warmup_tokens + (self.decay_tokens or 0)
        if self.total_tokens is not None and falling > self.total_tokens:
            raise rejection(
                "total_tokens", f"{self.total_tokens} is less than warmup_tokens + decay_tokens, {falling}"
            )
        return self


class Ramp(Section):
    """Batch size in tokens, a function of tokens seen in its phase: a line or steps.

    The line goes from `start_tokens` to `end_tokens` over `ramp_tokens`, then stays. Either is rounded to
    whole microbatches, at least one: only their number changes, never a shape.
    """

    start_tokens: PositiveTokens | None = setting(None, "tokens in the first batch; required without `steps`")
    end_tokens: PositiveTokens | None = setting(
        None, "tokens in a batch once ramped; required without `steps`"
    )
    ramp_tokens: Tokens = setting(0, "tokens seen while ramping; 0 starts at end_tokens")
    steps: BatchSteps | None = setting(
        None, "batch sizes from numbers of tokens on, instead of a line: '0: 16M, 250B: 32M'"
    )

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.steps is not None:
            for name in ("start_tokens", "end_tokens"):
                if getattr(self, name) is not None:
                    raise rejection(name, f"{getattr(self, name)} is not read beside steps; leave one out")
            if self.ramp_tokens:
                raise rejection("ramp_tokens", f"{self.ramp_tokens} is not read beside steps; leave one out")
            return self
        for name, meaning in (("start_tokens", "first batch"), ("end_tokens", "last batch")):
            if getattr(self, name) is None:
                raise rejection(name, f"missing; the tokens of the {meaning}, or give steps")
        if self.first_tokens > self.last_tokens:
            raise rejection("start_tokens", f"{self.start_tokens} is more than end_tokens {self.end_tokens}")
        return self

    @property
    def first_tokens(self) -> int:
        """Tokens of the first batch of a line, or of the first step."""
        return self.sizes[0][1] if self.steps is not None else self.start_tokens or 0

    @property
    def last_tokens(self) -> int:
        """Tokens of a batch at the end."""
        return self.sizes[-1][1] if self.steps is not None else self.end_tokens or 0

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(start in tokens, batch in tokens) of each step; empty for a line."""
        return () if self.steps is None else parse_steps(self.steps, parse_batch)


class BatchSection(Section):
    """One microbatch: the fixed shape that every compiled program sees."""

    rows: PositiveInt = required("sequences in one microbatch, over all data shards")
    sequence_length: PositiveInt = required("tokens in one row; documents are packed into rows")


class MuonSection(Section):
    """Muon, for matrices. Updates are scaled so that AdamW's learning rates carry over."""

    momentum: Momentum = setting(0.95, "GLM-4.5")
    nesterov: bool = setting(True, "Muon's reference implementation and Moonlight")
    newton_schulz_steps: PositiveInt = setting(5, "GLM-4.5")
    coefficients: Literal["standard", "polar_express", "four_steps"] = setting(
        "standard", "Moonlight's; unpublished for GLM-4.5. four_steps is made for schatten8 and 4 steps"
    )
    algorithm: Literal["direct", "gram"] = setting(
        "direct", "as published; gram computes the same from M x M matrices, with less arithmetic"
    )
    normalization: Literal["frobenius", "schatten8"] = setting(
        "frobenius", "as published; schatten8 is a closer bound, so that fewer steps do"
    )
    update_rms: PositiveFloat = setting(0.2, "GLM-4.5: the RMS of AdamW's updates in practice")
    weight_decay: NonNegativeFloat = setting(0.1, "GLM-4.5")
    momentum_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "exact; bfloat16 halves Muon's only state"
    )
    iteration_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "bfloat16 on accelerators, where it is the faster product; float32 agrees across meshes"
    )
    split_heads: bool = setting(
        False, "GLM-4.5 takes q, k and v projections whole; true orthogonalises each head's part alone"
    )
    qk_clip: PositiveFloat | None = setting(
        None, "largest attention logit: a head above it has its q and k weights shrunk; 100 in Kimi K2"
    )

    @model_validator(mode="after")
    def _whole_sequence(self) -> Self:
        if self.coefficients == "four_steps" and self.newton_schulz_steps < 4:
            raise rejection(
                "newton_schulz_steps",
                f"{self.newton_schulz_steps} cuts coefficients four_steps off; expected at least 4",
            )
        return self


class AdamWSection(Section):
    """AdamW, for the embedding, biases, norms and other parameters that are no matrix."""

    b1: Momentum = setting(0.9, "the usual value; unpublished for GLM-4.5")
    b2: Momentum = setting(0.95, "the usual value for language models; unpublished for GLM-4.5")
    eps: PositiveFloat = setting(1e-8, "the usual value")
    weight_decay: NonNegativeFloat = setting(0.1, "as Muon's; of matrices only, norms and biases have none")


class OptimizerSection(Section):
    muon: MuonSection = section(MuonSection, "matrices")
    adamw: AdamWSection = section(AdamWSection, "the excepted parameters")
    clip_norm: PositiveFloat = setting(1.0, "global gradient norm before the optimizer; the usual value")
    lm_head_uses_muon: bool = setting(True, "GLM-4.5 excepts only word embedding, biases and norms")
    overrides: dict[str, Literal["muon", "adamw", "frozen"]] = setting(
        {}, "parameter paths as patterns, such as '*/router/kernel': adamw; the first that matches decides"
    )


class PhaseSection(Section):
    """Fields of supervised and reinforcement phases."""

    steps: NonNegativeInt = Field(
        description="optimizer steps in this phase", json_schema_extra={"resumable": True}
    )
    learning_rate: Schedule = required("of Muon and AdamW alike")
    batch: Ramp = required("batch size warm-up")
    router_bias_rate: Rate = setting(
        0.001, "step of the selection bias towards balance, without a loss; GLM-4.5 has '0: 0.001, 15T: 0'"
    )
    aux_loss_weight: Rate = setting(
        1e-4, "sequence-level balance loss: GLM-4.5's value, only against extreme imbalance within a sequence"
    )
    mtp_weight: Rate = setting(
        0.3, "loss of multi-token prediction, of models that have it; GLM-4.5 has '0: 0.3, 15T: 0.1'"
    )
    measure_noise: bool = setting(
        False,
        "estimate the gradient noise scale of each step, which says what batch size pays (`jaxtrain report "
        "--noise-scale`); costs a pass over the gradients a microbatch, and needs two of them",
        resumable=True,
    )


class StageSection(Section):
    """Shape of a microbatch and RoPE base from a number of tokens on. Each stage compiles its programs."""

    tokens: Tokens = required("tokens seen in the phase when the stage begins; 0 for the first")
    rows: PositiveInt = required("sequences in one microbatch, over all data shards")
    sequence_length: PositiveInt = required("tokens in one row")
    rope_theta: PositiveFloat | None = setting(None, "base of the rotary embedding; None is the model's")


class SupervisedSection(PhaseSection):
    """Steps on documents; their loss weights select the tokens."""

    loss: Annotated[Reference, named("next_token")] = setting(
        Reference(name="next_token"), "what is minimised", reference="loss"
    )
    source: Annotated[Reference, named("worked_answers")] = setting(
        Reference(name="worked_answers"), "where documents come from", reference="source"
    )
    too_long: Literal["refuse", "skip", "split"] = setting(
        "refuse", "documents longer than a row; split: cut where the seed says, every token is predicted once"
    )
    stages: list[StageSection] = setting(
        [], "sequence length and RoPE base by tokens seen; empty: the batch section's, and the model's base"
    )

    @model_validator(mode="after")
    def _stages_ascend(self) -> Self:
        starts = [stage.tokens for stage in self.stages]
        if starts and starts[0] != 0:
            raise rejection("stages", f"the first begins at {starts[0]} tokens, not at 0")
        for before, after in zip(starts, starts[1:], strict=False):
            if after <= before:
                raise rejection("stages", f"one begins at {after} tokens after one at {before}; they ascend")
        return self


class RlSection(PhaseSection):
    """Policy-gradient steps on what the fleet has sent; GRPO without KL by default."""

    loss: Annotated[Reference, named("double_sided")] = setting(
        Reference(name="double_sided"), "what is minimised: needs no pass of an old policy", reference="loss"
    )
    advantage: Annotated[Reference, named("group_mean")] = setting(
        Reference(name="group_mean"),
        "what an answer is worth beside those to the same prompt",
        reference="advantage",
    )
    average: Literal["tokens", "trajectories"] = setting(
        "tokens",
        "what the loss is a mean over; trajectories: each counts the same whatever its length, as in GSPO",
    )


class CheckpointSection(Section):
    every_steps: PositiveInt = setting(
        10, "a restart redoes at most this many steps from their plans", resumable=True
    )
    keep: PositiveInt = setting(2, "the last, and one more in case it cannot be read", resumable=True)


class EvaluationSection(Section):
    """Held-out prompts, greedy, all tokens at one exact version, before and after training."""

    prompts: PositiveInt = setting(200, "standard error of a mean reward in [0, 1] is at most 0.036")
    timeout_s: PositiveFloat = setting(
        900.0, "how long the trainer waits for the fleet's answers at the end", resumable=True
    )


class FailureSection(Section):
    max_nonfinite_steps: NonNegativeInt = setting(
        3, "steps in a row skipped for a non-finite loss or gradient before the run stops", resumable=True
    )
    store_patience_s: PositiveFloat = setting(
        3600.0,
        "a trainer waits so long for a store that is away; an outage rarely lasts an hour",
        resumable=True,
    )
