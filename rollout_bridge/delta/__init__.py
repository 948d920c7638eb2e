"""Codec of weight updates: (old bits, new bits) -> bytes -> new bits. Pure, lossless, no I/O."""

from rollout_bridge.delta.blob import ArrayChange, DeltaError, DenseChange, SparseChange
from rollout_bridge.delta.classes import ClassRanks
from rollout_bridge.delta.codec import decode, decode_full, decode_sparse, encode, encode_full, encode_sparse
from rollout_bridge.delta.group import Group
from rollout_bridge.delta.group import decode as decode_group
from rollout_bridge.delta.grouping import encode_group, together
from rollout_bridge.delta.reference import conditional_entropy_bytes, conditional_entropy_bytes_sparse

__all__ = [
    "ArrayChange",
    "ClassRanks",
    "DenseChange",
    "DeltaError",
    "Group",
    "SparseChange",
    "conditional_entropy_bytes",
    "conditional_entropy_bytes_sparse",
    "decode",
    "decode_full",
    "decode_group",
    "decode_sparse",
    "encode",
    "encode_full",
    "encode_group",
    "encode_sparse",
    "together",
]
