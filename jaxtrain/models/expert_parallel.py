"""Routed experts on a mesh: copies of a token are sent to the devices that hold its experts.

Rows are split over data, fsdp and expert, sequences over context; experts are split over expert, their hidden
width over tensor, their model width over fsdp (gathered here, one layer at a time). A (token, choice) pair is
sent to the owner of its expert by an all-to-all over the expert axis, computed there, and its weighted result
is sent back. Neither experts nor their gradients move over the expert axis.

Dropless with bounded memory: a round moves at most `capacity` pairs from one device to another, and there are
as many rounds as the fullest link needs, one when the load is balanced to within `BUFFER`. If every token
chooses the same expert, one device does all the work, in many rounds. Storing what the backward pass needs of
several rounds would be unbounded, so it recomputes each round from the tokens.
"""

# B rows, S sequence, N tokens of a device, k experts a token, D model, E experts, F expert hidden,
# P devices of the expert axis, L experts of a device, C pairs a round from one device to another

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.models.config import ExpertImplementation
from jaxtrain.models.expert_blocks import take_or_zero
from jaxtrain.models.expert_windows import Kernels
from jaxtrain.models.experts import routed_experts
from jaxtrain.models.placement import (
    EXPERT_AXIS,
    FSDP_AXIS,
    TENSOR_AXIS,
    activation_spec,
    axis_size,
    platform,
)

BUFFER = 1.5  # pairs a round may move, as a multiple of a balanced load; a fuller link takes another round
ROW_MULTIPLE = 8  # a capacity that tiles well


class Exchange(enum.StrEnum):
    """How pairs are sent. PADDED sends whole buffers, on any platform; RAGGED only the rows in use."""

    PADDED = "padded"
    RAGGED = "ragged"


@dataclass(frozen=True)
class _Plan:
    """Values of all rounds; static, so they must be hashable."""

    experts: int
    experts_per_token: int
    devices: int
    capacity: int
    implementation: ExpertImplementation
    platform: str
    exchange: Exchange
    all_axes: tuple[str, ...]
    gathered: bool

    @property
    def local_experts(self) -> int:
        return self.experts // self.devices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Links:
    """Pairs of this device in the order of the device they go to.

    order: int32 [N*k], flat pair index. starts, counts: int32 [P], of each link in `order`. position: int32
    [N, k], of each pair in its link. target: int32 [N, k], the device. rounds: int32, the same everywhere.
    """

    order: jax.Array
    starts: jax.Array
    counts: jax.Array
    position: jax.Array
    target: jax.Array
    rounds: jax.Array


def parallel_experts(
    x_BSD: jax.Array,
    ids_BSk: jax.Array,
    weights_BSk: jax.Array,
    kernels: Kernels,
    *,
    mesh: Mesh,
    implementation: ExpertImplementation,
    buffer: float = BUFFER,
    exchange: Exchange | None = None,
) -> jax.Array:
    """`routed_experts` of global arrays -> [B, S, D], split like x.

    exchange: by default RAGGED where the platform has it (TPU, GPU), else PADDED.
    Raises ValueError when the expert axis does not divide the experts.
    """
    devices, experts = axis_size(mesh, EXPERT_AXIS), kernels[0].shape[0]
    if experts % devices:
        raise ValueError(
            f"{experts} experts are not divisible by the {devices} devices of mesh axis {EXPERT_AXIS!r}; "
            "choose an expert axis that divides them"
        )
    if exchange is None:
        exchange = Exchange.PADDED if platform(mesh) == "cpu" else Exchange.RAGGED
    token_devices = math.prod(size for axis, size in mesh.shape.items() if axis != TENSOR_AXIS)
    pairs = ids_BSk.size // token_devices
    worst = pairs // ids_BSk.shape[-1] * min(ids_BSk.shape[-1], experts // devices)
    balanced = -(-math.ceil(buffer * pairs / devices) // ROW_MULTIPLE) * ROW_MULTIPLE
    plan = _Plan(
        experts=experts,
        experts_per_token=ids_BSk.shape[-1],
        devices=devices,
        capacity=min(worst, balanced),
        implementation=implementation,
        platform=platform(mesh),
        exchange=exchange,
        all_axes=mesh.axis_names,
        gathered=axis_size(mesh, FSDP_AXIS) > 1,
    )
    split_width = axis_size(mesh, TENSOR_AXIS) > 1

    def local(x: jax.Array, ids: jax.Array, weights: jax.Array, kernels: Kernels) -> jax.Array:
        x_ND = x.reshape(-1, x.shape[-1])
        ids_Nk, weights_Nk = (a.reshape(x_ND.shape[0], -1) for a in (ids, weights))
        if devices == 1:
            out = _local_experts(x_ND, ids_Nk, weights_Nk, _gather(kernels, plan), plan)
        elif plan.capacity == worst:
            links = _links(ids_Nk, plan)
            out = _round(jnp.int32(0), x_ND, ids_Nk, weights_Nk, _gather(kernels, plan), links, plan)
        else:
            out = _in_rounds(plan, x_ND, ids_Nk, weights_Nk, kernels)
        out = out.reshape(x.shape)
        return out[None] if split_width else out

    tokens = activation_spec(mesh)
    into, from_ = _kernel_specs(mesh)
    out = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, (into, into, from_)),
        out_specs=PartitionSpec(TENSOR_AXIS, *tokens) if split_width else tokens,
        check_vma=False,
    )(x_BSD, ids_BSk, weights_BSk, kernels)
    # Summed out here, so that the backward pass has nothing to sum over the tensor axis for this output.
    return out.sum(0) if split_width else out


def _kernel_specs(mesh: Mesh) -> tuple[PartitionSpec, PartitionSpec]:
    expert, fsdp, tensor = (
        a if a in mesh.axis_names else None for a in (EXPERT_AXIS, FSDP_AXIS, TENSOR_AXIS)
    )
    return PartitionSpec(expert, fsdp, tensor), PartitionSpec(expert, tensor, fsdp)


def _gather(kernels: Kernels, plan: _Plan) -> Kernels:
    """Local experts whole in the model width. Its transpose scatters the sum of their gradients over fsdp."""
    if not plan.gathered:
        return kernels
    return tuple(
        jax.lax.all_gather(kernel, FSDP_AXIS, axis=axis, tiled=True)
        for kernel, axis in zip(kernels, (1, 1, 2), strict=True)
    )


def _in_rounds(
    plan: _Plan, x_ND: jax.Array, ids_Nk: jax.Array, weights_Nk: jax.Array, kernels: Kernels
) -> jax.Array:
    """All rounds; keeps its arguments for the backward pass and nothing else."""

    @jax.custom_vjp
    def run(x_ND: jax.Array, weights_Nk: jax.Array, kernels: Kernels, ids_Nk: jax.Array) -> jax.Array:
        links, whole = _links(ids_Nk, plan), _gather(kernels, plan)
        return _sum_of_rounds(
            lambda r: _round(r, x_ND, ids_Nk, weights_Nk, whole, links, plan), jnp.zeros_like(x_ND), links
        )

    def forward(*args: jax.Array | Kernels) -> tuple[jax.Array, tuple]:
        return run(*args), args

    def backward(residual: tuple, grad_ND: jax.Array) -> tuple:
        x_ND, weights_Nk, kernels, ids_Nk = residual
        links = _links(ids_Nk, plan)
        whole, scatter = jax.vjp(lambda kernels: _gather(kernels, plan), kernels)

        def one(r: jax.Array) -> tuple:
            _, pull = jax.vjp(
                lambda x, w, kernels: _round(r, x, ids_Nk, w, kernels, links, plan), x_ND, weights_Nk, whole
            )
            return pull(grad_ND)

        zeros = jax.tree.map(jnp.zeros_like, (x_ND, weights_Nk, whole))
        grad_x, grad_weights, grad_whole = _sum_of_rounds(one, zeros, links)
        return grad_x, grad_weights, *scatter(grad_whole), np.zeros(ids_Nk.shape, jax.dtypes.float0)

    run.defvjp(forward, backward)
    return run(x_ND, weights_Nk, kernels, ids_Nk)


def _sum_of_rounds(one: Callable[[jax.Array], Any], zeros: Any, links: _Links) -> Any:
    def body(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        r, total = carry
        return r + 1, jax.tree.map(jnp.add, total, one(r))

    return jax.lax.while_loop(lambda carry: carry[0] < links.rounds, body, (jnp.int32(0), zeros))[1]


def _links(ids_Nk: jax.Array, plan: _Plan) -> _Links:
    target = (ids_Nk // plan.local_experts).astype(jnp.int32)
    flat = target.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=plan.devices).astype(jnp.int32)
    starts = jnp.cumsum(counts) - counts
    rank = jnp.arange(flat.size, dtype=jnp.int32) - starts[flat[order]]
    position = jnp.zeros_like(flat).at[order].set(rank, unique_indices=True)
    # The largest of the whole mesh, not only of the expert axis: all devices then run the same rounds.
    most = jax.lax.pmax(counts.max(), plan.all_axes)
    return _Links(
        order=order,
        starts=starts,
        counts=counts,
        position=position.reshape(ids_Nk.shape),
        target=target,
        rounds=-(-most // plan.capacity),
    )


def _round(
    r: jax.Array,
    x_ND: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    kernels: Kernels,
    links: _Links,
    plan: _Plan,
) -> jax.Array:
    """The part of the result from pairs at positions [r*C, (r+1)*C) of every link -> [N, D]."""
    pairs, capacity = ids_Nk.size, plan.capacity
    sent_P = jnp.clip(links.counts - r * capacity, 0, capacity)
    used_PC = jnp.arange(capacity) < sent_P[:, None]
    index_PC = links.starts[:, None] + r * capacity + jnp.arange(capacity)
    source = jnp.where(used_PC, links.order[jnp.minimum(index_PC, pairs - 1)], pairs).reshape(-1)
    slot_Nk = jnp.where(
        links.position // capacity == r, links.target * capacity + links.position % capacity, source.size
    )
    rows = _to_rows(x_ND, source, slot_Nk)
    row_weights = _permute(weights_Nk.reshape(-1), source, slot_Nk.reshape(-1))
    row_ids = jnp.where(
        source < pairs,
        ids_Nk.reshape(-1)[jnp.minimum(source, pairs - 1)] % plan.local_experts,
        plan.local_experts,
    )
    received_P = jax.lax.all_to_all(sent_P, EXPERT_AXIS, 0, 0, tiled=True)
    rows = _send(rows, sent_P, received_P, plan)
    row_ids, row_weights = (
        jax.lax.all_to_all(a, EXPERT_AXIS, 0, 0, tiled=True) for a in (row_ids, row_weights)
    )
    out = _local_experts(rows, row_ids[:, None], row_weights[:, None], kernels, plan)
    return _from_rows(_send(out, received_P, sent_P, plan), source, slot_Nk)


def _local_experts(
    x_ND: jax.Array, ids_Nk: jax.Array, weights_Nk: jax.Array, kernels: Kernels, plan: _Plan
) -> jax.Array:
    return routed_experts(
        x_ND, ids_Nk, weights_Nk, kernels, implementation=plan.implementation, platform=plan.platform
    )


def _send(rows: jax.Array, sent_P: jax.Array, received_P: jax.Array, plan: _Plan) -> jax.Array:
    """Rows [P*C, D] by target -> rows [P*C, D] by origin. Its transpose sends them back."""
    if plan.exchange is Exchange.PADDED:
        return jax.lax.all_to_all(rows, EXPERT_AXIS, 0, 0, tiled=True)
    places = jnp.arange(plan.devices, dtype=jnp.int32) * plan.capacity
    mine = jnp.full_like(places, jax.lax.axis_index(EXPERT_AXIS) * plan.capacity)
    return jax.lax.ragged_all_to_all(
        rows, jnp.zeros_like(rows), places, sent_P, mine, received_P, axis_name=EXPERT_AXIS
    )


# Tokens and rows are related by a known injection of pairs, so both directions are gathers, and each is the
# gradient of the other: autodiff's scatter-add is serial on CPU and atomic on GPU.


def _no_gradient(*index: jax.Array) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(a.shape, jax.dtypes.float0) for a in index)


@jax.custom_vjp
def _to_rows(x_ND: jax.Array, source: jax.Array, slot_Nk: jax.Array) -> jax.Array:
    """[P*C, D]: the token of the pair in each row, zero in a row without one."""
    return take_or_zero(x_ND, source // slot_Nk.shape[1])


@jax.custom_vjp
def _from_rows(rows: jax.Array, source: jax.Array, slot_Nk: jax.Array) -> jax.Array:
    """[N, D]: the sum of each token's rows."""
    return take_or_zero(rows, slot_Nk).sum(axis=1)


@jax.custom_vjp
def _permute(values: jax.Array, source: jax.Array, slot: jax.Array) -> jax.Array:
    """values[source]; slot[source[i]] = i wherever `source` is in range."""
    return take_or_zero(values, source)


_to_rows.defvjp(
    lambda x, source, slot: (_to_rows(x, source, slot), (source, slot)),
    lambda index, grad: (_from_rows(grad, *index), *_no_gradient(*index)),
)
_from_rows.defvjp(
    lambda rows, source, slot: (_from_rows(rows, source, slot), (source, slot)),
    lambda index, grad: (_to_rows(grad, *index), *_no_gradient(*index)),
)
_permute.defvjp(
    lambda values, source, slot: (_permute(values, source, slot), (source, slot)),
    lambda index, grad: (take_or_zero(grad, index[1]), *_no_gradient(*index)),
)
