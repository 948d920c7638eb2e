"""Batch-size warmup: how many microbatches a step takes, as a function of tokens seen."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A batch size that grows from `start_tokens` to `end_tokens` over the first `ramp_tokens`, then stays.

    GLM-4.5: 16M to 64M tokens over the first 500B (arXiv 2508.06471). A function of tokens seen, so a
    resumed run takes the batches that an uninterrupted one takes; integer arithmetic, so it is exact at any
    size.

    Attributes:
      start_tokens, end_tokens: tokens of a batch at the start and from `ramp_tokens` on.
      ramp_tokens: tokens seen when the ramp is over; 0 for a constant batch of end_tokens.
      microbatch_tokens: tokens of one microbatch over the whole mesh; batches are rounded to whole ones,
        halves up.
    """

    start_tokens: int
    end_tokens: int
    ramp_tokens: int
    microbatch_tokens: int

    def __post_init__(self) -> None:
        for name in ("start_tokens", "end_tokens", "microbatch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"batch_ramp.{name}: found {getattr(self, name)}, expected at least 1 token")
        if self.ramp_tokens < 0:
            raise ValueError(f"batch_ramp.ramp_tokens: found {self.ramp_tokens}, expected 0 or more")

    def microbatches(self, tokens_seen: int) -> int:
        """Returns the number of microbatches, at least 1, of the step that follows `tokens_seen` tokens."""
        if tokens_seen < 0:
            raise ValueError(f"batch_ramp: found {tokens_seen} tokens seen, expected 0 or more")
        # Batch = start + (end - start) * part / whole, in exact integers.
        part, whole = (tokens_seen, self.ramp_tokens) if tokens_seen < self.ramp_tokens else (1, 1)
        tokens_times_whole = self.start_tokens * whole + (self.end_tokens - self.start_tokens) * part
        unit = self.microbatch_tokens * whole
        return max(1, (2 * tokens_times_whole + unit) // (2 * unit))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SteppedBatch:
    """Batch sizes, each from a number of tokens on: ((0, 16M), (250B, 32M)).

    Attributes:
      steps: (start in tokens seen, tokens of a batch), ascending, the first from 0.
      microbatch_tokens: as in `BatchRamp`, with the same rounding.
    """

    steps: tuple[tuple[int, int], ...]
    microbatch_tokens: int

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.steps]
        if not starts or starts[0] != 0 or any(b <= a for a, b in zip(starts, starts[1:], strict=False)):
            raise ValueError(f"batch steps: found starts {starts}, expected 0 and then ascending ones")
        for start, tokens in self.steps:
            if tokens < 1:
                raise ValueError(f"batch steps: found {tokens} tokens a batch at {start}, expected 1 or more")
        if self.microbatch_tokens < 1:
            raise ValueError(
                f"batch steps: found microbatch_tokens {self.microbatch_tokens}, expected at least 1 token"
            )

    def microbatches(self, tokens_seen: int) -> int:
        """Returns the number of microbatches, at least 1, of the step that follows `tokens_seen` tokens."""
        if tokens_seen < 0:
            raise ValueError(f"batch steps: found {tokens_seen} tokens seen, expected 0 or more")
        tokens = next(tokens for start, tokens in reversed(self.steps) if tokens_seen >= start)
        return max(1, (2 * tokens + self.microbatch_tokens) // (2 * self.microbatch_tokens))
