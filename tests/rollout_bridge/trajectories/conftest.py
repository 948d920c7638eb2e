"""Groups of trajectories with made-up tokens, a fresh store in memory, and settings of a selection."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxtrain.rl.advantages.group_mean import GroupMean
from rollout_bridge.store import Store
from rollout_bridge.trajectories.gate import Gate
from rollout_bridge.trajectories.groups import Boundary
from rollout_bridge.trajectories.schema import Status, Trajectory, Turn, TurnKind
from rollout_bridge.trajectories.selection import SelectionSettings

MakeGroup = Callable[..., list[Trajectory]]
TOKENS = 5  # of a trajectory of `make_group` without lengths and versions
LENGTH = TOKENS - 1  # positions that it takes


def selection_settings(sequence_length: int, *, rows: int = 1, **changes: Any) -> SelectionSettings:
    """Lag at most 4, half of a trajectory fresh and half of a group valid, one length bin, no filter."""
    usual = {
        "gate": Gate(max_lag=4, min_fresh_fraction=0.5),
        "min_valid_fraction": 0.5,
        "boundary": Boundary.INCLUSIVE,
        "length_bin_edges": (),
        "routed_experts": None,
        "advantage": GroupMean(),
        "filters": (),
    }
    return SelectionSettings(rows=rows, sequence_length=sequence_length, **(usual | changes))


@pytest.fixture
def store() -> Store:
    return Store.open(f"memory://{uuid.uuid4().hex}", probe=False)


def made_group(
    index: int,
    *,
    rewards: Sequence[float] = (0.0, 1.0),
    versions: Sequence[Sequence[int]] | None = None,
    statuses: Sequence[Status] | None = None,
    lengths: Sequence[int] | None = None,
    created_at: float = 0.0,
    worker: str = "w",
) -> list[Trajectory]:
    """A group of prompt `index`: answers of `lengths` tokens (or one a version) after 2 of prompt."""
    group = []
    for member, reward in enumerate(rewards):
        spans = [0] * (lengths[member] if lengths else 3) if versions is None else list(versions[member])
        total = 2 + len(spans)
        group.append(
            Trajectory(
                trajectory_id=f"{index:08d}/{member}",
                group_id=f"{index:08d}",
                prompt_index=index,
                member=member,
                task="made/up",
                token_ids=np.arange(total, dtype=np.int32) + index,
                trainable=np.arange(total) >= 2,
                behavior_logprobs=np.where(np.arange(total) >= 2, -0.5, 0).astype(np.float32),
                versions=np.array([-1, -1, *spans], np.int32),
                turns=(Turn(TurnKind.PROMPT, 0, 2), Turn(TurnKind.MODEL, 2, total)),
                temperature=1.0,
                seed=member,
                max_tokens=64,
                finish_reason="stop",
                kv_policy="keep_kv",
                status=Status.OK if statuses is None else statuses[member],
                reward=reward,
                rewards={"correct": reward, "exact": float(reward == 1)},
                engine="made-up",
                worker=worker,
                created_at=created_at,
                generate_seconds=0.25,
                routed_experts=np.full((total, 3, 2), -1, np.int16) if index % 2 else None,
                metadata={"note": "né"} if index % 2 else {},
            )
        )
    return group


@pytest.fixture(scope="session")
def make_group() -> MakeGroup:
    return made_group
