"""Log-probabilities of targets from final hidden states, or their weighted sum, on one device or on a mesh.

On a mesh every device projects its own tokens: a scan over chunks of all tokens would project each of them
on every device. The head is gathered once. Devices of the tensor axis hold the same tokens and split them.
"""

# B rows, S sequence, N tokens of a device, D model, V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.losses.token_logprobs import TokenLogprobs, token_logprobs
from jaxtrain.losses.weighted_nll import WeightedNll, weighted_nll
from jaxtrain.models.definition import Definition
from jaxtrain.models.placement import FSDP_AXIS, TENSOR_AXIS, activation_spec, axis_size


def target_logprobs(
    definition: Definition,
    params: Mapping[str, jax.Array],
    hidden_BSD: jax.Array,
    targets_BS: jax.Array,
    **options_BS: jax.Array | None,
) -> TokenLogprobs:
    """`token_logprobs` of all tokens, arrays [N] in the order of `targets_BS.reshape(-1)`.

    options_BS: its arrays of tokens by name without the axes (temperature, counted), each [B, S] or None.
    Axes may precede the rows, the same in all arguments.
    """
    head_DV = definition.head(params)
    options = {name: value for name, value in options_BS.items() if value is not None}
    if definition.mesh is None:
        return _of_tokens(hidden_BSD, head_DV, targets_BS, options)
    return _on_mesh(hidden_BSD, head_DV.astype(hidden_BSD.dtype), targets_BS, options, definition.mesh)


def target_nll(
    definition: Definition,
    params: Mapping[str, jax.Array],
    hidden_BSD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
) -> WeightedNll:
    """`weighted_nll` of all tokens. Axes may precede the rows, the same in all arguments."""
    head_DV = definition.head(params)
    tokens = (targets_BS, weights_BS)
    if definition.mesh is None:
        hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
        return weighted_nll(hidden_ND, head_DV, *(x.reshape(-1) for x in tokens))
    return _nll_on_mesh(hidden_BSD, head_DV.astype(hidden_BSD.dtype), *tokens, definition.mesh)


def _nll_on_mesh(
    hidden_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, mesh: Mesh
) -> WeightedNll:
    share = partial(_own_share, shared_by=axis_size(mesh, TENSOR_AXIS))

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> WeightedNll:
        out = weighted_nll(
            share(hidden.reshape(-1, hidden.shape[-1])),
            _whole_head(head, mesh),
            share(targets.reshape(-1)),
            share(weights.reshape(-1), fill=0.0),
        )
        return jax.tree.map(lambda x: x[None], out)

    rows = PartitionSpec(*(None for _ in targets_BS.shape[2:]), *activation_spec(mesh))
    sums = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, _head_spec(mesh), rows, rows),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )(hidden_BSD, head_DV, targets_BS, weights_BS)
    return jax.tree.map(jnp.sum, sums)


def _of_tokens(
    hidden_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, options: dict[str, jax.Array]
) -> TokenLogprobs:
    hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
    flat: dict[str, Any] = {f"{name}_N": value.reshape(-1) for name, value in options.items()}
    return token_logprobs(hidden_ND, head_DV, targets_BS.reshape(-1), **flat)


def _on_mesh(
    hidden_BSD: jax.Array,
    head_DV: jax.Array,
    targets_BS: jax.Array,
    options: dict[str, jax.Array],
    mesh: Mesh,
) -> TokenLogprobs:
    shared_by = axis_size(mesh, TENSOR_AXIS)

    def local(
        hidden: jax.Array, head: jax.Array, targets: jax.Array, options: dict[str, jax.Array]
    ) -> TokenLogprobs:
        head = _whole_head(head, mesh)
        if shared_by == 1:
            out = _of_tokens(hidden, head, targets, options)
        else:
            share = partial(_own_share, shared_by=shared_by)
            flat = jax.tree.map(lambda x: share(x.reshape(-1)), (targets, options))
            out = _of_tokens(share(hidden.reshape(-1, hidden.shape[-1])), head, *flat)
            out = jax.tree.map(lambda x: jax.lax.all_gather(x, TENSOR_AXIS, tiled=True), out)
        return jax.tree.map(lambda x: x[: targets.size].reshape(targets.shape), out)

    rows = PartitionSpec(*(None for _ in targets_BS.shape[2:]), *activation_spec(mesh))
    out = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, _head_spec(mesh), rows, rows), out_specs=rows, check_vma=False
    )(hidden_BSD, head_DV, targets_BS, options)
    return jax.tree.map(lambda x: x.reshape(-1), out)


def _head_spec(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in (FSDP_AXIS, TENSOR_AXIS)))


def _whole_head(head_DV: jax.Array, mesh: Mesh) -> jax.Array:
    """The head, gathered from the devices that hold its parts; under shard_map."""
    for axis, dimension in ((FSDP_AXIS, 0), (TENSOR_AXIS, 1)):
        if axis_size(mesh, axis) > 1:
            head_DV = jax.lax.all_gather(head_DV, axis, axis=dimension, tiled=True)
    return head_DV


def _own_share(x_Nx: jax.Array, *, shared_by: int, fill: float | None = None) -> jax.Array:
    """This device's run of ceil(N / shared_by) tokens, filled up with copies of the last or with `fill`."""
    if shared_by == 1:
        return x_Nx
    size = -(-x_Nx.shape[0] // shared_by)
    widths = ((0, size * shared_by - x_Nx.shape[0]), *((0, 0) for _ in x_Nx.shape[1:]))
    if fill is None:
        padded = jnp.pad(x_Nx, widths, mode="edge")
    else:
        padded = jnp.pad(x_Nx, widths, constant_values=fill)
    return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(TENSOR_AXIS) * size, size)
