"""A decoder's sizes, and how it is computed."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollout_bridge import architectures
from rollout_bridge.architectures.decoder import DecoderConfig


class ExpertImplementation(enum.StrEnum):
    """How routed experts are computed; the mathematics is the same.

    AUTO picks per platform: RAGGED on TPU; elsewhere BLOCKS, or DENSE where few tokens give it fewer rows.
    DENSE runs every expert on every token and is the reference.
    BLOCKS sorts tokens by expert, a block of rows for each. RAGGED is `jax.lax.ragged_dot`.
    """

    AUTO = "auto"
    DENSE = "dense"
    BLOCKS = "blocks"
    RAGGED = "ragged"


class AttentionImplementation(enum.StrEnum):
    """How attention within packed documents is computed; the mathematics is the same.

    AUTO picks per platform: TRITON on GPU, SPLASH on TPU, XLA elsewhere. XLA holds scores [S, S] and is the
    reference. CHUNKED is online softmax over chunks of keys, on any platform; a sequence split between
    devices always takes it. TRITON and SPLASH are Pallas kernels that compare document ids. CUDNN is cuDNN's
    flash attention with a bias [S, S].
    """

    AUTO = "auto"
    XLA = "xla"
    CHUNKED = "chunked"
    CUDNN = "cudnn"
    TRITON = "triton"
    SPLASH = "splash"


class Remat(enum.StrEnum):
    """What the backward pass recomputes: nothing, everything in a layer, or all but matrix products."""

    NONE = "none"
    FULL = "full"
    DOTS = "dots"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """The sizes of a decoder, and how it is computed, which a config.json does not contain.

    replay_threshold: see `replay.choose`.
    measure_max_logits: training reports each head's largest attention logit (`QkClip`).
    """

    compute_dtype: str = "bfloat16"
    expert_implementation: ExpertImplementation = ExpertImplementation.AUTO
    attention_implementation: AttentionImplementation = AttentionImplementation.AUTO
    remat: Remat = Remat.NONE
    replay_threshold: float = 0.5
    measure_max_logits: bool = False

    @classmethod
    def of(cls, decoder: DecoderConfig, **numerics: Any) -> ModelConfig:
        """`decoder`, computed with `numerics`: fields of `NUMERICS`."""
        ways = {name: NUMERICS[name](value) for name, value in numerics.items()}
        return cls(**{item.name: getattr(decoder, item.name) for item in fields(DecoderConfig)}, **ways)

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], **numerics: Any) -> ModelConfig:
        """The decoder of a Hugging Face config.json; see `architectures.read` for its errors."""
        return cls.of(architectures.read(hf_config), **numerics)


# Converts a value of the experiment's config to the type of the field.
NUMERICS: dict[str, Callable[[Any], Any]] = {
    "compute_dtype": str,
    "expert_implementation": ExpertImplementation,
    "attention_implementation": AttentionImplementation,
    "remat": Remat,
    "replay_threshold": float,
}
