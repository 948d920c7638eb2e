"""What every trajectory of a run keeps: `control/contract.json`, written once by the trainer.

A worker compares its own before it starts. A reader judges each row by it: rows of a worker with other
prompts or another sampling would be trained on as if they were the policy's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from rollout_bridge.control import CONTRACT_KEY, Record, read
from rollout_bridge.engines.routing import implausible
from rollout_bridge.errors import ExpectedError
from rollout_bridge.store import Store
from rollout_bridge.trajectories.groups import VALID
from rollout_bridge.trajectories.schema import Status, Trajectory

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[int, Field(ge=1)]


class ContractError(ExpectedError, ValueError):
    """A trainer or worker that would break the contract of the store's run; names fields and values."""


class Contract(Record):
    """environment: name, options and seed of the prompts. vocabulary: token ids are below it. max_tokens: of
    a trajectory, its prompt included. num_experts: of a layer with routed ones, 0 without. reward_range: of a
    valid trajectory, both ends included.
    """

    environment: dict[str, Any]
    group_size: _Positive
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    vocabulary: _Positive
    max_tokens: _Positive
    num_experts: Annotated[int, Field(ge=0)]
    reward_range: tuple[_Number, _Number]

    @model_validator(mode="after")
    def _range_ascends(self) -> Self:
        if self.reward_range[0] > self.reward_range[1]:
            raise ValueError(f"reward_range {list(self.reward_range)} does not ascend")
        return self

    @property
    def key(self) -> str:
        return CONTRACT_KEY

    def problem(self, trajectory: Trajectory) -> str:
        """What of the trajectory breaks the contract, "" if nothing does."""
        t, (low, high) = trajectory, self.reward_range
        if t.temperature != self.temperature:
            return f"temperature {t.temperature:g}, the run's is {self.temperature:g}"
        if (largest := int(np.max(t.token_ids))) >= self.vocabulary:
            return f"token id {largest} is not below the vocabulary of {self.vocabulary}"
        if len(t.token_ids) > self.max_tokens:
            return f"{len(t.token_ids)} tokens, the run's limit is {self.max_tokens}"
        if t.routed_experts is not None and (
            problem := implausible(t.routed_experts, tokens=len(t.token_ids), num_experts=self.num_experts)
        ):
            return f"routed experts: {problem}"
        if t.status in VALID and not low <= t.reward <= high:
            return f"reward {t.reward:g} is not in [{low:g}, {high:g}]"
        return ""

    def with_reward_in_range(self, t: Trajectory) -> Trajectory:
        """The trajectory; one whose reward is out of range becomes an environment failure that says so."""
        low, high = self.reward_range
        if t.status not in VALID or low <= t.reward <= high:
            return t
        detail = f"reward {t.reward:g} is not in [{low:g}, {high:g}], the environment's reward_range"
        failed = Status.ENVIRONMENT_FAILURE
        return replace(t, status=failed, reward=0.0, rewards={}, metadata=t.metadata | {"detail": detail})

    def problem_of_segment(
        self, trajectories: Sequence[Trajectory], written_by: Mapping[str, Any] | None
    ) -> str:
        """What of a whole segment breaks the contract, "" if nothing does.

        written_by: the contract that its worker knew, as JSON; None from a worker without one.
        """
        if written_by is not None and (differs := difference(written_by, self.to_json())):
            return f"its worker had another contract: {differs}"
        for row, trajectory in enumerate(trajectories):
            if problem := self.problem(trajectory):
                return f"row {row} ({trajectory.trajectory_id}): {problem}"
        # An episode may have several trajectories, never none.
        for group, size in Counter(t.group_id for t in trajectories).items():
            if size < self.group_size:
                return f"group {group} has {size} trajectories, the run's group_size is {self.group_size}"
        return ""


def create_or_compare(store: Store, contract: Contract) -> None:
    """For the trainer: the contract of a new run, or that of the run which the store holds.

    Raises `ContractError` where they differ.
    """
    if not store.create_json(CONTRACT_KEY, contract.to_json()):
        compare(store, contract, who="trainer")


def compare(store: Store, contract: Contract, *, who: str) -> None:
    """Raises `ContractError` where the store's contract, if it has one, is not `contract`."""
    found = read(store, Contract, CONTRACT_KEY)
    if found is None or found == contract:
        return
    theirs, mine = found.to_json(), contract.to_json()
    raise ContractError(
        f"{store.url}{CONTRACT_KEY}: this {who} would make or train other trajectories than the run in this "
        f"store: {difference(mine, theirs)}. Use the run's config, or another store"
    )


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Each field that differs, with both values."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return "; ".join(f"{name} {mine.get(name)!r}, the run's is {theirs.get(name)!r}" for name in names)
