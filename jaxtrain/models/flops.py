"""Parameters and floating-point operations of a decoder, counted from its parameter paths.

A matrix of P entries costs a token 2P operations forward and 4P backward. Attention adds, for each query and
each key it sees, 4 operations a channel forward and 8 backward (scores and mixing). Recomputation, norms,
softmax and the optimizer are left out: these are model FLOPs, as MFU counts them (PaLM, arXiv 2204.02311,
appendix B), except that a causal query is charged for the keys it sees, not for the whole row.
"""

# D model, H heads, h head dim, E experts, k experts a token, L layers, S sequence

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtrain.models.definition import Definition

FORWARD, FORWARD_AND_BACKWARD = 2, 6  # operations for each token and matrix entry


@dataclass(frozen=True)
class Part:
    """One part of a decoder.

    name: embedding, lm_head, attention, dense_mlp, router, routed_experts, shared_experts, mtp or norms.
    parameters: held, buffers included. active: used by one token. matmul: entries of matrices that multiply a
    token, once for each time they do; a tied head's are counted at lm_head, an untied embedding has none.
    """

    name: str
    parameters: int
    active: int
    matmul: int


@dataclass(frozen=True)
class Flops:
    """Operations of one token: those of matrices, and those of attention for each key that its query sees."""

    per_token: int
    per_pair: int

    def total(self, *, tokens: float, pairs: float) -> float:
        """Operations of `tokens` tokens whose queries see `pairs` keys in total."""
        return self.per_token * tokens + self.per_pair * pairs

    def at_length(self, sequence_length: int) -> float:
        """Per token of one whole document of `sequence_length` tokens: (S + 1) / 2 keys on average."""
        return self.total(tokens=1, pairs=(sequence_length + 1) / 2)


def parts(definition: Definition) -> tuple[Part, ...]:
    """The parts that a decoder has, largest first. Their parameters sum to all of it."""
    config = definition.config
    sums: dict[str, list[int]] = {}
    depth = _layers(definition, "mtp")
    for path, leaf in definition.shapes.items():
        name, size = _part(path), math.prod(leaf.shape)
        routed = "/experts/" in path
        active = size * config.num_experts_per_tok // config.n_routed_experts if routed else size
        uses = 1 + depth if path == "lm_head/kernel" else int(routed or path.endswith("/kernel"))
        _add(sums, name, size, active, active * uses)
    if "lm_head/kernel" not in definition.shapes:
        tied = math.prod(definition.shapes["embedding"].shape)
        _add(sums, "lm_head", 0, 0, tied * (1 + depth))
    return tuple(sorted((Part(name, *s) for name, s in sums.items()), key=lambda part: -part.parameters))


def training_flops(definition: Definition) -> Flops:
    """Forward and backward, MTP layers included."""
    return _flops(definition, FORWARD_AND_BACKWARD, without=())


def inference_flops(definition: Definition) -> Flops:
    """Forward alone, without MTP layers."""
    counted = _flops(definition, FORWARD, without=("mtp", "lm_head"))
    vocabulary = definition.config.vocab_size * definition.config.hidden_size
    return Flops(counted.per_token + FORWARD * vocabulary, counted.per_pair)


def _flops(definition: Definition, per_entry: int, *, without: tuple[str, ...]) -> Flops:
    matmul = sum(part.matmul for part in parts(definition) if part.name not in without)
    channels = sum(
        _layers(definition, stack) * _query_width(definition, stack)
        for stack in ("dense", "moe", "mtp")
        if stack not in without
    )
    return Flops(per_token=per_entry * matmul, per_pair=2 * per_entry * channels)


def _add(sums: dict[str, list[int]], name: str, *values: int) -> None:
    sums[name] = [a + b for a, b in zip(sums.get(name, (0, 0, 0)), values, strict=True)]


def _part(path: str) -> str:
    if path.startswith("mtp/"):
        return "mtp"
    if path == "embedding" or path.startswith("lm_head/"):
        return path.partition("/")[0]
    if path.endswith("norm"):
        return "norms"
    if "/attention/" in path:
        return "attention"
    for piece, name in (("router", "router"), ("experts", "routed_experts"), ("shared", "shared_experts")):
        if f"/mlp/{piece}/" in path:
            return name
    return "dense_mlp"


def _query_kernel(definition: Definition, stack: str) -> tuple[int, ...]:
    """Shape [L, D, H h] of the stack's query projection, (0, 0, 0) if there is no such stack."""
    found = [
        leaf.shape
        for path, leaf in definition.shapes.items()
        if path.startswith(f"{stack}/") and path.endswith("attention/q_proj/kernel")
    ]
    return tuple(found[0]) if found else (0, 0, 0)


def _layers(definition: Definition, stack: str) -> int:
    return math.prod(_query_kernel(definition, stack)[:-2])


def _query_width(definition: Definition, stack: str) -> int:
    return _query_kernel(definition, stack)[-1]
