"""Codec of weight updates: (old bits, new bits) -> bytes -> new bits. Pure, lossless, no I/O."""

from rollout_bridge.delta.change import ArrayChange, DenseChange, SparseChange
from rollout_bridge.delta.classes import ClassRanks
from rollout_bridge.delta.codec import (
    decode,
    decode_full,
    decode_sparse,
    encode,
    encode_full,
    encode_sparse,
)
from rollout_bridge.delta.errors import DeltaError
from rollout_bridge.delta.group import Group
from rollout_bridge.delta.group import decode as decode_group
from rollout_bridge.delta.many import decode_many, encode_group, encode_many, split_stacked, together
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
    "decode_many",
    "decode_sparse",
    "encode",
    "encode_full",
    "encode_group",
    "encode_many",
    "encode_sparse",
    "split_stacked",
    "together",
]
