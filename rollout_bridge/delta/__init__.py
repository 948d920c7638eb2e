"""Codec of weight updates: (old bits, new bits) -> bytes -> new bits. Pure, lossless, no I/O."""

from rollout_bridge.delta.codec import (
    Dense,
    DeltaError,
    SparseChange,
    decode,
    decode_full,
    decode_many,
    decode_sparse,
    encode,
    encode_full,
    encode_many,
    encode_sparse,
)
from rollout_bridge.delta.reference import conditional_entropy_bytes, conditional_entropy_bytes_sparse

__all__ = [
    "Dense",
    "DeltaError",
    "SparseChange",
    "conditional_entropy_bytes",
    "conditional_entropy_bytes_sparse",
    "decode",
    "decode_full",
    "decode_many",
    "decode_sparse",
    "encode",
    "encode_full",
    "encode_many",
    "encode_sparse",
]
