"""Causal attention within packed documents: which implementation, and how it runs on a mesh.

All implementations compute the same function. XLA holds the scores [S, S] of one layer at a time, and the
compiler partitions it. The others run on each device's own rows and heads; of them only CUDNN holds an array
[S, S], the bias that separates documents. A sequence split between devices
always uses the ring of chunks (`context_parallel`).
"""

# B rows, S sequence, H heads, K kv heads, G = H/K, h head dim

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as triton_attention
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import Mesh

from jaxtrain.models.config import AttentionImplementation
from jaxtrain.models.context_parallel import Ring, ring_attention
from jaxtrain.models.placement import (
    SEQUENCE_AXIS,
    TENSOR_AXIS,
    activation_spec,
    axis_size,
    platform,
    spans_devices,
)

SPLASH_BLOCK = 512  # queries and keys of a tile; a smaller sequence is one tile, a multiple of SPLASH_LANES
SPLASH_LANES = 128
TRITON_BLOCK = 128  # queries and keys of a tile of the forward pass
TRITON_GRADIENT_BLOCK = 32  # of the backward pass, which holds more in registers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionSegments:
    """The document of each token, int32 [B, S], 0 is padding; the mask [B, S, S] where one is used."""

    segment_ids: jax.Array
    mask: jax.Array | None


def documents(
    segment_ids_BS: jax.Array,
    implementation: AttentionImplementation,
    *,
    dtype: jax.typing.DTypeLike,
    mesh: Mesh | None,
) -> AttentionSegments:
    """What the attention of every layer reads from a batch, computed once. dtype: of the queries."""
    whole = resolve(implementation, dtype=dtype, mesh=mesh) is AttentionImplementation.XLA
    return AttentionSegments(segment_ids_BS, document_mask(segment_ids_BS) if whole else None)


def document_mask(segment_ids_BS: jax.Array) -> jax.Array:
    """[B, S, S], True where a query may see a key: same document, not later. Padding has segment id 0."""
    same = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    length = segment_ids_BS.shape[1]
    return same & jnp.tril(jnp.ones((length, length), bool))[None]


def resolve(
    implementation: AttentionImplementation, *, dtype: jax.typing.DTypeLike, mesh: Mesh | None
) -> AttentionImplementation:
    """The implementation that runs for queries of `dtype`.

    Raises ValueError if the platform lacks it, or lacks it in this dtype: cuDNN has no float32.
    """
    if axis_size(mesh, SEQUENCE_AXIS) > 1:
        return AttentionImplementation.CHUNKED
    full = jnp.dtype(dtype) == jnp.float32
    if implementation is AttentionImplementation.AUTO:
        on_gpu = AttentionImplementation.CHUNKED if full else AttentionImplementation.TRITON
        fastest = {"gpu": on_gpu, "tpu": AttentionImplementation.SPLASH}
        return fastest.get(platform(mesh), AttentionImplementation.XLA)
    if implementation is AttentionImplementation.CUDNN and platform(mesh) != "gpu":
        raise ValueError(
            f"attention implementation 'cudnn' needs a GPU, but the devices are {platform(mesh)}; "
            "choose auto, xla or chunked"
        )
    if implementation is AttentionImplementation.CUDNN and full:
        raise ValueError(
            "attention implementation 'cudnn' has no float32; compute in bfloat16, or choose auto, "
            "xla or chunked"
        )
    return implementation


def attend_documents(
    q_BSHh: jax.Array,
    k_BSKh: jax.Array,
    v_BSKh: jax.Array,
    documents: AttentionSegments,
    *,
    implementation: AttentionImplementation,
    mesh: Mesh | None,
) -> jax.Array:
    """Scaled softmax attention (float32 statistics) within documents -> [B, S, H, h].

    Raises ValueError when the tensor axis neither divides the kv heads nor is a multiple of them.
    """
    chosen = resolve(implementation, dtype=q_BSHh.dtype, mesh=mesh)
    if chosen is AttentionImplementation.XLA:
        # Recompute the scores [S, S] in the backward pass: stored, they would be most of a layer's memory.
        return jax.checkpoint(masked_attention)(q_BSHh, k_BSKh, v_BSKh, documents.mask)
    local = {
        AttentionImplementation.CHUNKED: partial(_chunked, ring=_ring(mesh)),
        AttentionImplementation.CUDNN: _cudnn,
        AttentionImplementation.SPLASH: partial(_splash, interpret=platform(mesh) != "tpu"),
        AttentionImplementation.TRITON: partial(_triton, interpret=platform(mesh) != "gpu"),
    }[chosen]
    if not spans_devices(mesh):
        return local(q_BSHh, k_BSKh, v_BSKh, documents.segment_ids)
    k_BSKh, v_BSKh = (_for_tensor_axis(x, axis_size(mesh, TENSOR_AXIS)) for x in (k_BSKh, v_BSKh))
    heads, tokens = activation_spec(mesh, TENSOR_AXIS), activation_spec(mesh)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(heads, heads, heads, tokens), out_specs=heads, check_vma=False
    )(q_BSHh, k_BSKh, v_BSKh, documents.segment_ids)


def masked_attention(
    q_BSHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, mask_BST: jax.Array
) -> jax.Array:
    """Softmax attention under any mask -> [B, S, H, h]. Holds scores [S, T]; statistics in float32."""
    b, s, heads, h = q_BSHh.shape
    q_BSKGh = q_BSHh.reshape(b, s, k_BTKh.shape[2], -1, h)
    scores = jnp.einsum("BSKGh,BTKh->BKGST", q_BSKGh, k_BTKh, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BST[:, None, None], scores * h**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKh.dtype)
    return jnp.einsum("BKGST,BTKh->BSKGh", weights, v_BTKh).reshape(b, s, heads, h)


def _chunked(
    q_BSHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, segments_BS: jax.Array, *, ring: Ring
) -> jax.Array:
    b, s, heads, h = q_BSHh.shape
    q_BSKGh = q_BSHh.reshape(b, s, k_BSKh.shape[2], -1, h)
    return ring_attention(q_BSKGh, k_BSKh, v_BSKh, segments_BS, ring=ring).reshape(b, s, heads, h)


def _ring(mesh: Mesh | None) -> Ring:
    size = axis_size(mesh, SEQUENCE_AXIS)
    return Ring(SEQUENCE_AXIS, size) if size > 1 else Ring()


def _cudnn(q_BSHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """Flash attention of cuDNN; a bias [B, 1, S, S] in the dtype of q separates documents."""
    same = segments_BS[:, None, :, None] == segments_BS[:, None, None, :]
    return jax.nn.dot_product_attention(
        q_BSHh, k_BSKh, v_BSKh, mask=same, is_causal=True, implementation="cudnn"
    )


def _triton(
    q_BSHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, segments_BS: jax.Array, *, interpret: bool
) -> jax.Array:
    """Flash attention by jax's Pallas kernel for Triton, which compares the documents of a tile's tokens."""
    length, heads, h = q_BSHh.shape[1:]
    extra = -length % TRITON_BLOCK
    group = heads // k_BSKh.shape[2]  # the kernel takes as many key heads as query heads
    repeated = (q_BSHh, *(jnp.repeat(x, group, axis=2) for x in (k_BSKh, v_BSKh)))
    q, k, v = (jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) for x in repeated)
    segments = jnp.pad(segments_BS, ((0, 0), (0, extra)), constant_values=-1)
    block = min(TRITON_BLOCK, TRITON_GRADIENT_BLOCK)
    sizes = triton_attention.BlockSizes(
        block_q=TRITON_BLOCK,
        block_k=TRITON_BLOCK,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    out: Any = triton_attention.mha(
        q, k, v, segments, sm_scale=h**-0.5, causal=True, block_sizes=sizes, interpret=interpret
    )
    return out[:, :length]


def _splash(
    q_BSHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, segments_BS: jax.Array, *, interpret: bool
) -> jax.Array:
    """Splash attention, a Pallas kernel for TPU that skips what the causal mask hides."""
    b, s, heads, h = q_BSHh.shape
    block = min(SPLASH_BLOCK, -(-s // SPLASH_LANES) * SPLASH_LANES)
    extra = -s % block
    pad = ((0, 0), (0, extra), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, pad).transpose(0, 2, 1, 3) for x in (q_BSHh * h**-0.5, k_BSKh, v_BSKh))
    segments = jnp.pad(segments_BS, ((0, 0), (0, extra)), constant_values=-1)
    kernel = _splash_kernel(heads, s + extra, block, interpret)
    out = jax.vmap(kernel)(q, k, v, splash_attention.SegmentIds(q=segments, kv=segments))
    return out.transpose(0, 2, 1, 3)[:, :s].astype(q_BSHh.dtype)


def _splash_kernel(heads: int, length: int, block: int, interpret: bool) -> Any:
    """Typed Any: its call is typed as a tuple with residuals, which exist only on request."""
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * heads)
    sizes = splash_attention.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash_attention.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )


def _for_tensor_axis(x_BSKh: jax.Array, size: int) -> jax.Array:
    """kv heads, repeated until the tensor axis divides them: each of its devices then holds one head."""
    k = x_BSKh.shape[2]
    if k % size == 0:
        return x_BSKh
    if size % k:
        raise ValueError(
            f"mesh axis {TENSOR_AXIS!r} of {size} devices neither divides the {k} kv heads nor is a multiple "
            "of them; choose another size"
        )
    return jnp.repeat(x_BSKh, size // k, axis=2)
