"""The training state: a partition of all parameters into trained, frozen, and buffers.

Only trained parameters have gradients, sums and optimizer state. A frozen parameter may be a part of the
model, or another model under its own prefix (a reference, a teacher). Losses read all of them from one
mapping of path to array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtrain.models.definition import Definition
from jaxtrain.models.sharding_rules import parameter_shardings, row_sharding
from sharding.tree import shardings_like

Arrays = dict[str, Any]  # of arrays, or of their shapes or shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """params: trained float32 masters by path. frozen: parameters that no step changes.

    buffers: without gradient, changed by their own rules. optimizer: state of the trained parameters.
    """

    params: Arrays
    frozen: Arrays
    buffers: Arrays
    optimizer: optax.OptState

    @property
    def model(self) -> Arrays:
        """Every array by path, as losses and the publisher take them."""
        return {**self.params, **self.frozen, **self.buffers}


@dataclass(frozen=True)
class StatePlacement:
    """Shardings on the mesh; `state` holds a NamedSharding for each array."""

    mesh: Mesh | AbstractMesh
    state: TrainState
    rows: NamedSharding
    replicated: NamedSharding


def abstract_state(
    definition: Definition,
    optimizer: optax.GradientTransformation,
    *,
    frozen: frozenset[str] = frozenset(),
    further: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> TrainState:
    """Shapes of the state; allocates nothing.

    frozen: paths of the model that are not trained. further: parameters of further models, which are not
    trained either, by prefix/path.
    """
    shapes = definition.shapes
    params = {path: s for path, s in shapes.items() if path not in definition.buffers | frozen}
    return TrainState(
        params=params,
        frozen={path: shapes[path] for path in sorted(frozen)} | dict(further or {}),
        buffers={path: shapes[path] for path in definition.buffers},
        optimizer=jax.eval_shape(optimizer.init, params),
    )


def place(definition: Definition, abstract: TrainState, mesh: Mesh | AbstractMesh) -> StatePlacement:
    """Shardings of state and batch; a parameter of a further model lies as the model's own of that path.

    Raises `sharding.ShardingError` before anything is allocated.
    """
    where = parameter_shardings(definition, mesh)
    params, frozen, buffers = (
        {path: where[path if path in where else path.partition("/")[2]] for path in part}
        for part in (abstract.params, abstract.frozen, abstract.buffers)
    )
    return StatePlacement(
        mesh=mesh,
        state=TrainState(
            params=params,
            frozen=frozen,
            buffers=buffers,
            optimizer=shardings_like(abstract.optimizer, abstract.params, params, mesh),
        ),
        rows=row_sharding(mesh),
        replicated=NamedSharding(mesh, PartitionSpec()),
    )


def state_of(
    values: Mapping[str, jax.Array], optimizer: optax.GradientTransformation, placement: StatePlacement
) -> TrainState:
    """The state of given parameters and buffers by path, on their shards, with empty optimizer state."""
    where = placement.state
    params = {path: values[path] for path in where.params}
    return TrainState(
        params=params,
        frozen={path: values[path] for path in where.frozen},
        buffers={path: values[path] for path in where.buffers},
        optimizer=jax.jit(optimizer.init, out_shardings=where.optimizer)(params),
    )


def sharded_shapes(definition: Definition, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters as shapes that carry their shardings, as the optimizer's layout needs them."""
    where = parameter_shardings(definition, mesh)
    return {
        path: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where[path])
        for path, shape in definition.shapes.items()
        if path not in definition.buffers
    }
