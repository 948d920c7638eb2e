"""Environment-failure filter, group recovery and the group-mean baseline.

A trajectory whose environment failed has no reward. If enough of its group is left, valid
members are duplicated to restore the group's size; else the whole group is discarded (Solar Open 2, arXiv
2607.20062).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from rollout_bridge.trajectories.schema import Status

# A malformed answer comes from the policy: it is trained on, with the reward the environment gave it.
VALID = frozenset({Status.OK, Status.MALFORMED})


class Boundary(enum.StrEnum):
    """Whether a group with exactly the smallest valid fraction is kept. Sources differ."""

    INCLUSIVE = "inclusive"
    EXCLUSIVE = "exclusive"


def recovery_slots(
    statuses: Sequence[Status], *, min_valid_fraction: float, boundary: Boundary
) -> tuple[int, ...] | None:
    """How often each member is used so that the group keeps its size; None if the group is discarded.

    Failed members get 0 slots; the missing ones go round the valid members in order.
    """
    valid = [index for index, status in enumerate(statuses) if status in VALID]
    fraction = len(valid) / len(statuses)
    kept = fraction > min_valid_fraction if boundary is Boundary.EXCLUSIVE else fraction >= min_valid_fraction
    if not valid or not kept:
        return None
    slots = [0] * len(statuses)
    for position in range(len(statuses)):
        slots[valid[position % len(valid)]] += 1
    return tuple(slots)


def group_advantages(
    rewards: Sequence[float], *, divide_by_std: bool = False, epsilon: float = 1e-6
) -> list[float]:
    """Reward minus the group's mean (GRPO's baseline; dividing by the standard deviation is its original
    form).

    rewards: of the valid members, each once. Exact sums, so the order of the members changes no bit.
    """
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return [value / (std + epsilon) for value in centred]
