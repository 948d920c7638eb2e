"""The reward minus the mean of its group: GRPO's baseline (arXiv 2402.03300)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_bridge.trajectories.log import TrajectoryRef
from rollout_bridge.trajectories.schema import Trajectory

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class GroupMean:
    """The same number for every token.

    divide_by_std: by the standard deviation of the group's rewards, as GRPO was published; off as in GLM-4.5.
    """

    divide_by_std: bool = False

    def of_group(self, members: Sequence[TrajectoryRef]) -> list[float]:
        """Exact sums, so the order of the members changes no bit."""
        rewards = [member.reward for member in members]
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        if not self.divide_by_std:
            return centred
        std = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
        return [value / (std + EPSILON) for value in centred]

    def of_tokens(self, trajectory: Trajectory, advantage: float) -> float:
        return advantage
