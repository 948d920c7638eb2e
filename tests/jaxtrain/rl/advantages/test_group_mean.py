"""The group-mean baseline against hand calculation, and as a law of any rewards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.rl.advantages.group_mean import EPSILON, GroupMean
from rollout_bridge.trajectories.log import TrajectoryRef
from rollout_bridge.trajectories.schema import Status


def group(*rewards: float) -> list[TrajectoryRef]:
    return [
        TrajectoryRef(
            segment="s",
            row=member,
            trajectory_id=f"0/{member}",
            group_id="0",
            prompt_index=0,
            member=member,
            tokens=5,
            version_counts=((0, 3),),
            reward=reward,
            status=Status.OK,
            created_at=0.0,
        )
        for member, reward in enumerate(rewards)
    ]


def test_by_hand() -> None:
    assert GroupMean().of_group(group(0.0, 1.0, 1.0, 0.0)) == [-0.5, 0.5, 0.5, -0.5]
    assert GroupMean().of_group(group(0.25)) == [0.0]
    # mean 1, deviations -1 and 1, standard deviation 1
    found = GroupMean(divide_by_std=True).of_group(group(0.0, 2.0))
    assert found == pytest.approx([-1.0, 1.0], rel=2 * EPSILON, abs=0)


@given(rewards=st.lists(st.floats(0, 1), min_size=1, max_size=9), seed=st.randoms(use_true_random=False))
def test_advantages_sum_to_zero_and_ignore_order_bit_for_bit(rewards, seed) -> None:
    advantages = dict(zip(rewards, GroupMean().of_group(group(*rewards)), strict=True))
    assert abs(math.fsum(GroupMean().of_group(group(*rewards)))) < 1e-12
    seed.shuffle(rewards)
    assert [advantages[reward] for reward in rewards] == GroupMean().of_group(group(*rewards))
