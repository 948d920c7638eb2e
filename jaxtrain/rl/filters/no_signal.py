"""A group whose rewards are all equal has no gradient under a group baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_bridge.trajectories.log import TrajectoryRef


@dataclass(frozen=True)
class NoSignal:
    @property
    def reason(self) -> str:
        return "no_signal"

    def keep(self, members: Sequence[TrajectoryRef], *, version: int) -> list[bool]:
        rewards = [member.reward for member in members]
        return [min(rewards) != max(rewards)] * len(members)
