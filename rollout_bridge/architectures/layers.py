"""Checkpoint names and layouts of a decoder's tensors, and what an engine does with each."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_bridge.architectures.decoder import DecoderConfig
from rollout_bridge.architectures.tensors import Role, TensorSource

SWIGLU = ("gate_proj", "up_proj", "down_proj")


def decoder(
    c: DecoderConfig, *, moe: str = "mlp", expert: tuple[str, str, str] = SWIGLU
) -> Iterator[TensorSource]:
    """Every tensor of the checkpoint, one tensor an expert and projection, in the order of the layers.

    moe: the module of a layer's router and experts. expert: an expert's gate, up and down projection.
    """
    hidden, vocabulary = c.hidden_size, c.vocab_size
    yield TensorSource("model.embed_tokens.weight", "embedding", (), False, (vocabulary, hidden))
    for layer in range(c.num_hidden_layers):
        prefix, dense = f"model.layers.{layer}", layer < c.first_k_dense_replace
        if dense:
            yield from _attention(c, prefix, "dense", layer)
            yield from _swiglu(f"{prefix}.mlp", "dense/mlp", (layer,), (hidden, c.intermediate_size))
            yield from _norms(c, prefix, "dense", layer)
        else:
            yield from _moe_layer(c, prefix, "moe", layer - c.first_k_dense_replace, moe, expert)
    for depth in range(c.num_nextn_predict_layers):
        yield from _next_token_layer(c, depth, moe, expert)
    yield TensorSource("model.norm.weight", "final_norm", (), False, (hidden,))
    if not c.tie_word_embeddings:
        yield TensorSource("lm_head.weight", "lm_head/kernel", (), True, (vocabulary, hidden))


def next_token_prefix(c: DecoderConfig, depth: int) -> str:
    """Layers that predict further tokens (MTP) are numbered after the others."""
    return f"model.layers.{c.num_hidden_layers + depth}"


def _norms(c: DecoderConfig, prefix: str, group: str, index: int) -> Iterator[TensorSource]:
    for ours, theirs in (
        ("input_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
    ):
        name = f"{prefix}.{theirs}.weight"
        yield TensorSource(name, f"{group}/{ours}", (index,), False, (c.hidden_size,))


def _attention(c: DecoderConfig, prefix: str, group: str, index: int) -> Iterator[TensorSource]:
    """Projections of one layer; a bias is of query, key and value."""
    hidden, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    for projection, width in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        ours, theirs = f"{group}/attention/{projection}", f"{prefix}.self_attn.{projection}"
        shape = (width * c.head_dim, hidden)
        yield TensorSource(f"{theirs}.weight", f"{ours}/kernel", (index,), True, shape, Role.QKV)
        if c.attention_bias:
            yield TensorSource(f"{theirs}.bias", f"{ours}/bias", (index,), False, shape[:1])
    output = f"{prefix}.self_attn.o_proj.weight"
    shape = (hidden, heads * c.head_dim)
    yield TensorSource(output, f"{group}/attention/o_proj/kernel", (index,), True, shape, Role.ROW)
    if c.use_qk_norm:
        for norm in ("q_norm", "k_norm"):
            theirs = f"{prefix}.self_attn.{norm}.weight"
            yield TensorSource(theirs, f"{group}/attention/{norm}", (index,), False, (c.head_dim,))


def _swiglu(prefix: str, path: str, index: tuple[int, ...], size: tuple[int, int]) -> Iterator[TensorSource]:
    """size: of the layer, hidden width and that of the MLP."""
    hidden, width = size
    for name in ("gate_proj", "up_proj"):
        theirs, ours = f"{prefix}.{name}.weight", f"{path}/{name}/kernel"
        yield TensorSource(theirs, ours, index, True, (width, hidden), Role.GATE_UP)
    theirs, ours = f"{prefix}.down_proj.weight", f"{path}/down_proj/kernel"
    yield TensorSource(theirs, ours, index, True, (hidden, width), Role.ROW)


def _moe_layer(
    c: DecoderConfig, prefix: str, group: str, index: int, moe: str, expert: tuple[str, str, str]
) -> Iterator[TensorSource]:
    """Routed experts, then the router, its correction bias and the shared experts as one MLP."""
    hidden, width = c.hidden_size, c.moe_intermediate_size
    yield from _attention(c, prefix, group, index)
    for number in range(c.n_routed_experts):
        for ours, theirs in zip(SWIGLU, expert, strict=True):
            out = ours == "down_proj"
            yield TensorSource(
                f"{prefix}.{moe}.experts.{number}.{theirs}.weight",
                f"{group}/mlp/experts/{ours}",
                (index, number),
                True,
                (hidden, width) if out else (width, hidden),
                Role.EXPERT_OUT if out else Role.EXPERT_IN,
            )
    router, ours = f"{prefix}.{moe}.gate", f"{group}/mlp/router"
    shape = (c.n_routed_experts, hidden)
    yield TensorSource(f"{router}.weight", f"{ours}/kernel", (index,), True, shape)
    if c.correction_bias:
        bias = f"{router}.e_score_correction_bias"
        yield TensorSource(bias, f"{ours}/correction_bias", (index,), False, shape[:1], Role.FLOAT32)
    if c.n_shared_experts:
        size = (hidden, c.n_shared_experts * width)
        yield from _swiglu(f"{prefix}.{moe}.shared_experts", f"{group}/mlp/shared", (index,), size)
    yield from _norms(c, prefix, group, index)


def _next_token_layer(
    c: DecoderConfig, depth: int, moe: str, expert: tuple[str, str, str]
) -> Iterator[TensorSource]:
    prefix, hidden = next_token_prefix(c, depth), c.hidden_size
    for norm in ("enorm", "hnorm"):
        yield TensorSource(f"{prefix}.{norm}.weight", f"mtp/{norm}", (depth,), False, (hidden,))
    joint = (hidden, 2 * hidden)
    yield TensorSource(f"{prefix}.eh_proj.weight", "mtp/eh_proj/kernel", (depth,), True, joint)
    yield from _moe_layer(c, prefix, "mtp/layer", depth, moe, expert)
    yield TensorSource(f"{prefix}.shared_head.norm.weight", "mtp/output_norm", (depth,), False, (hidden,))
