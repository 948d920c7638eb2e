"""The progress of a run, the JSON item of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PhaseProgress:
    """Progress of one phase.

    steps: optimizer steps done. tokens: valid tokens trained on; the phase's schedules are functions of them.
    source: state of the data after them, JSON; empty before the first step.
    """

    steps: int = 0
    tokens: int = 0
    source: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """step: optimizer steps of all phases. nonfinite: of the last ones, how many were skipped, one after
    another. phases: those that began, by name. rope_theta: base of the rotary embedding in the last step.
    """

    step: int = 0
    nonfinite: int = 0
    phases: Mapping[str, PhaseProgress] = field(default_factory=dict)
    rope_theta: float | None = None

    @property
    def tokens_seen(self) -> int:
        return sum(phase.tokens for phase in self.phases.values())

    def of(self, phase: str) -> PhaseProgress:
        return self.phases.get(phase, PhaseProgress())

    def stepped(
        self,
        phase: str,
        *,
        tokens: int,
        source: Mapping[str, Any],
        finite: bool,
        rope_theta: float | None = None,
    ) -> Progress:
        """After one more step of `phase` on `tokens` valid tokens."""
        before = self.of(phase)
        after = PhaseProgress(steps=before.steps + 1, tokens=before.tokens + tokens, source=source)
        return replace(
            self,
            step=self.step + 1,
            nonfinite=0 if finite else self.nonfinite + 1,
            phases={**self.phases, phase: after},
            rope_theta=rope_theta,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Progress:
        phases = {name: PhaseProgress(**record) for name, record in value["phases"].items()}
        return cls(**{**value, "phases": phases})
