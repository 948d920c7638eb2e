"""An advantage for each token: the group's, less for what the policy wrote long before the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_bridge.trajectories.log import TrajectoryRef
from rollout_bridge.trajectories.schema import Trajectory, TurnKind


@dataclass(frozen=True, kw_only=True)
class TurnDiscount:
    """The reward less its group's mean, times per_turn ** turns and per_token ** tokens that come after.

    Turns and tokens are the policy's; a tool's do not count.
    """

    per_turn: float = 0.9
    per_token: float = 1.0

    def __post_init__(self) -> None:
        for name in ("per_turn", "per_token"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not in (0, 1]")

    def of_group(self, members: Sequence[TrajectoryRef]) -> list[float]:
        mean = math.fsum(member.reward for member in members) / len(members)
        return [member.reward - mean for member in members]

    def of_tokens(self, trajectory: Trajectory, advantage: float) -> np.ndarray:
        values = np.zeros(len(trajectory.token_ids), np.float32)
        own = [turn for turn in trajectory.turns if turn.kind is TurnKind.MODEL]
        after = 0
        for turns, turn in enumerate(reversed(own)):
            length = turn.end - turn.start
            tokens = after + np.arange(length)[::-1]
            values[turn.start : turn.end] = advantage * self.per_turn**turns * self.per_token**tokens
            after += length
        return values
