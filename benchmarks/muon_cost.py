"""Operations of Muon: on the busiest device of a mesh, and as part of a training step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.optim.distribution import Placement, sharing_is_faster
from jaxtrain.optim.muon import MatrixLayout, MuonConfig, groups_of
from jaxtrain.optim.newton_schulz import Algorithm, floating_point_operations, undivided_operations
from jaxtrain.optim.optimizer import OptimizerConfig, muon_layouts


@dataclasses.dataclass(frozen=True)
class Work:
    """Orthogonalisation of one group: parameters whose matrices have one shape and one placement.

    Attributes:
      paths, matrix, matrices: what the group holds.
      operations: of all its matrices.
      busiest: of the device that does most.
      optimum: of a device that takes ceil(matrices / devices) whole matrices.
    """

    paths: tuple[str, ...]
    matrix: tuple[int, int]
    matrices: int
    operations: int
    busiest: int
    optimum: int


def work(config: MuonConfig, layouts: Mapping[str, MatrixLayout]) -> tuple[Work, ...]:
    """Operations (multiplications plus additions of matrix products) of one update, by group."""
    found = []
    steps, algorithm = config.newton_schulz_steps, Algorithm(config.algorithm)
    for group in groups_of(layouts):
        members = group.layouts.values()
        one = floating_point_operations(*group.matrix, steps=steps, algorithm=algorithm)
        matrices = sum(layout.count for layout in members)
        where = group.placement
        busiest = matrices * one if where is None else _busiest(where, group, config, one)
        devices = 1 if where is None else where.mesh.size
        optimum = math.ceil(matrices / devices) * one
        found.append(Work(tuple(group.layouts), group.matrix, matrices, matrices * one, busiest, optimum))
    return tuple(found)


def _busiest(where: Placement, group: Any, config: MuonConfig, one: int) -> int:
    held = sum(layout.held for layout in group.layouts.values())
    rows, columns = group.matrix
    block = (held, rows // where.size(where.row_axes), columns // where.size(where.column_axes))
    how: dict[str, Any] = {"steps": config.newton_schulz_steps, "algorithm": Algorithm(config.algorithm)}
    if sharing_is_faster(block, where, **how):
        undivided = undivided_operations(min(group.matrix), **how)
        return held * (undivided + math.ceil((one - undivided) / where.blocks))
    return math.ceil(held / (where.blocks * where.replicas)) * one


@dataclasses.dataclass(frozen=True)
class StepShare:
    """Arithmetic of one device in one step, in operations.

    Attributes:
      model: forward and backward of its tokens.
      muon: of the busiest device's orthogonalisations.
    """

    model: float
    muon: float

    @property
    def share(self) -> float:
        """Muon's part of the step's operations."""
        return self.muon / (self.model + self.muon)


def step_share(
    config: OptimizerConfig,
    params: Mapping[str, Any],
    *,
    flops_per_token: float,
    tokens_per_device: float,
    devices: int,
) -> StepShare:
    """Muon's part of a step on `devices` devices that each train on `tokens_per_device` tokens.

    Every operation is assumed to cost the same (both are large matrix products), so time is operations.
    Forward and backward take `flops_per_token` (`models.flops`: 6 an active matrix entry, and attention; no
    recomputation, which would lower the share). Muon takes the operations of its matrix products: of each
    group of equal matrices a device takes ceil(matrices / devices) whole ones, except that a group of fewer
    matrices than devices is shared by all of them (`distribution`) where that is less: products among Gram
    matrices on every device, those with the matrix divided. Communication is left out: the matrices cross the
    mesh once each way in the iteration's dtype, while FSDP gathers once a layer, pass and microbatch. The
    momentum and the weight update are passes over memory, as in AdamW.

    params: path -> array or ShapeDtypeStruct; shardings are not read.
    """
    muon = 0.0
    steps, algorithm = config.muon.newton_schulz_steps, Algorithm(config.muon.algorithm)
    by_matrix: dict[tuple[int, int], int] = {}
    for layout in muon_layouts(config, params).values():
        by_matrix[layout.matrix] = by_matrix.get(layout.matrix, 0) + layout.count
    for matrix, count in by_matrix.items():
        one = floating_point_operations(*matrix, steps=steps, algorithm=algorithm)
        owned = math.ceil(count / devices) * one
        undivided = undivided_operations(min(matrix), steps=steps, algorithm=algorithm)
        muon += min(owned, count * (undivided + (one - undivided) / devices))
    return StepShare(model=flops_per_token * tokens_per_device, muon=muon)
