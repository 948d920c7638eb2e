"""Log-probabilities of targets from final hidden states, on one device or on a mesh.

On a mesh every device projects its own tokens: a scan over chunks of all tokens would project each of them
on every device. The head is gathered once; devices of the tensor axis, which hold the same tokens, share
them out.
"""

# B rows, S sequence, N tokens of a device, D model, V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.losses.token_logprobs import TokenLogprobs, token_logprobs
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


def _of_tokens(
    hidden_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, options: dict[str, jax.Array]
) -> TokenLogprobs:
    hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
    flat = {f"{name}_N": value.reshape(-1) for name, value in options.items()}
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
        for axis, dimension in ((FSDP_AXIS, 0), (TENSOR_AXIS, 1)):
            if axis_size(mesh, axis) > 1:
                head = jax.lax.all_gather(head, axis, axis=dimension, tiled=True)
        if shared_by == 1:
            out = _of_tokens(hidden, head, targets, options)
        else:
            share = partial(_own_share, shared_by=shared_by)
            flat = jax.tree.map(lambda x: share(x.reshape(-1)), (targets, options))
            out = _of_tokens(share(hidden.reshape(-1, hidden.shape[-1])), head, *flat)
            out = jax.tree.map(lambda x: jax.lax.all_gather(x, TENSOR_AXIS, tiled=True), out)
        return jax.tree.map(lambda x: x[: targets.size].reshape(targets.shape), out)

    rows = PartitionSpec(*(None for _ in targets_BS.shape[2:]), *activation_spec(mesh))
    fsdp, tensor = (axis if axis in mesh.axis_names else None for axis in (FSDP_AXIS, TENSOR_AXIS))
    out = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, PartitionSpec(fsdp, tensor), rows, rows),
        out_specs=rows,
        check_vma=False,
    )(hidden_BSD, head_DV, targets_BS, options)
    return jax.tree.map(lambda x: x.reshape(-1), out)


def _own_share(x_Nx: jax.Array, *, shared_by: int) -> jax.Array:
    """This device's run of ceil(N / shared_by) tokens, filled up with copies of the last."""
    size = -(-x_Nx.shape[0] // shared_by)
    extra = size * shared_by - x_Nx.shape[0]
    padded = jnp.pad(x_Nx, ((0, extra), *((0, 0) for _ in x_Nx.shape[1:])), mode="edge")
    return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(TENSOR_AXIS) * size, size)
