"""A filter: groups whose mean reward is high teach little more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rollout_bridge.trajectories.log import TrajectoryRef


@dataclass(frozen=True, kw_only=True)
class TooEasy:
    """above: a group with a higher mean reward is dropped."""

    above: float
    reason = "too_easy"

    def keep(self, members: Sequence[TrajectoryRef], *, version: int) -> list[bool]:
        return [fmean(member.reward for member in members) <= self.above] * len(members)
