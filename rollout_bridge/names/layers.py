"""Checkpoint names that architectures share: attention, norms and SwiGLU of a layer, embedding, head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_bridge.names.base import TensorSource, field

Config = Mapping[str, Any]


def embedding(c: Config) -> Iterator[TensorSource]:
    shape = (field(c, "vocab_size"), field(c, "hidden_size"))
    yield TensorSource("model.embed_tokens.weight", "embedding", (), False, shape)


def final(c: Config) -> Iterator[TensorSource]:
    """The last norm, and the head unless it is the embedding."""
    hidden = field(c, "hidden_size")
    yield TensorSource("model.norm.weight", "final_norm", (), False, (hidden,))
    if not c.get("tie_word_embeddings", False):
        yield TensorSource("lm_head.weight", "lm_head/kernel", (), True, (field(c, "vocab_size"), hidden))


def norms(c: Config, prefix: str, group: str, index: int) -> Iterator[TensorSource]:
    for ours, theirs in (
        ("input_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
    ):
        name = f"{prefix}.{theirs}.weight"
        yield TensorSource(name, f"{group}/{ours}", (index,), False, (field(c, "hidden_size"),))


def attention(
    c: Config, prefix: str, group: str, index: int, *, head_dim: int, bias: bool, qk_norm: bool
) -> Iterator[TensorSource]:
    """Projections of one layer; `bias` is of query, key and value."""
    hidden, heads = field(c, "hidden_size"), field(c, "num_attention_heads")
    kv_heads = c.get("num_key_value_heads") or heads
    for projection, width in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        ours, theirs = f"{group}/attention/{projection}", f"{prefix}.self_attn.{projection}"
        shape = (width * head_dim, hidden)
        yield TensorSource(f"{theirs}.weight", f"{ours}/kernel", (index,), True, shape)
        if bias:
            yield TensorSource(f"{theirs}.bias", f"{ours}/bias", (index,), False, shape[:1])
    output = f"{prefix}.self_attn.o_proj.weight"
    shape = (hidden, heads * head_dim)
    yield TensorSource(output, f"{group}/attention/o_proj/kernel", (index,), True, shape)
    if qk_norm:
        for norm in ("q_norm", "k_norm"):
            theirs = f"{prefix}.self_attn.{norm}.weight"
            yield TensorSource(theirs, f"{group}/attention/{norm}", (index,), False, (head_dim,))


def swiglu(
    prefix: str, path: str, index: tuple[int, ...], hidden: int, width: int, *, leaf: str = "/kernel"
) -> Iterator[TensorSource]:
    for projection in ("gate_proj", "up_proj"):
        yield TensorSource(
            f"{prefix}.{projection}.weight", f"{path}/{projection}{leaf}", index, True, (width, hidden)
        )
    yield TensorSource(f"{prefix}.down_proj.weight", f"{path}/down_proj{leaf}", index, True, (hidden, width))


def dense_mlp(c: Config, prefix: str, index: int) -> Iterator[TensorSource]:
    hidden, width = field(c, "hidden_size"), field(c, "intermediate_size")
    yield from swiglu(f"{prefix}.mlp", "dense/mlp", (index,), hidden, width)


def experts(c: Config, prefix: str, group: str, index: int, *, count: int) -> Iterator[TensorSource]:
    """Routed experts, one tensor an expert and projection, then the router."""
    hidden, width = field(c, "hidden_size"), field(c, "moe_intermediate_size")
    for expert in range(count):
        theirs = f"{prefix}.mlp.experts.{expert}"
        yield from swiglu(theirs, f"{group}/mlp/experts", (index, expert), hidden, width, leaf="")
    router = f"{prefix}.mlp.gate.weight"
    yield TensorSource(router, f"{group}/mlp/router/kernel", (index,), True, (count, hidden))


def dense_decoder(c: Config, *, head_dim: int, qk_norm: bool) -> Iterator[TensorSource]:
    """Every tensor of a decoder without experts."""
    yield from embedding(c)
    for layer in range(field(c, "num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        yield from attention(c, prefix, "dense", layer, head_dim=head_dim, bias=False, qk_norm=qk_norm)
        yield from dense_mlp(c, prefix, layer)
        yield from norms(c, prefix, "dense", layer)
    yield from final(c)
