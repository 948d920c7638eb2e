"""An update loads whole vLLM leaf modules. Expected sets are read off vLLM's Glm4Moe by hand."""

import pytest

from rollout_bridge.vllm_plugin.units import held_here, unit_of, units_of, untouched_units, whole_units

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LAYER = "model.layers.1"
NAMES = (
    "model.embed_tokens.weight",
    *(f"{LAYER}.self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "weight_scale_inv", "bias")),
    f"{LAYER}.self_attn.o_proj.weight",
    f"{LAYER}.self_attn.o_proj.weight_scale_inv",
    f"{LAYER}.self_attn.q_norm.weight",
    f"{LAYER}.mlp.gate.weight",
    f"{LAYER}.mlp.gate.e_score_correction_bias",
    *(f"{LAYER}.mlp.experts.{e}.{p}_proj.weight" for e in range(3) for p in ("gate", "up", "down")),
    *(f"{LAYER}.mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up", "down")),
    "model.layers.11.self_attn.q_proj.weight",
)


def test_a_bias_of_k_brings_weights_scales_and_biases_of_q_k_and_v() -> None:
    expected = tuple(
        f"{LAYER}.self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "weight_scale_inv", "bias")
    )
    assert whole_units([f"{LAYER}.self_attn.k_proj.bias"], NAMES, PACKED) == expected


def test_one_expert_matrix_brings_all_experts_of_its_layer_and_not_the_shared_ones() -> None:
    expected = {f"{LAYER}.mlp.experts.{e}.{p}_proj.weight" for e in range(3) for p in ("gate", "up", "down")}
    assert set(whole_units([f"{LAYER}.mlp.experts.2.up_proj.weight"], NAMES, PACKED)) == expected


def test_shared_gate_brings_up_but_not_down() -> None:
    found = whole_units([f"{LAYER}.mlp.shared_experts.gate_proj.weight"], NAMES, PACKED)
    assert found == tuple(f"{LAYER}.mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up"))


def test_router_and_scale_bring_their_modules() -> None:
    changed = [f"{LAYER}.mlp.gate.e_score_correction_bias", f"{LAYER}.self_attn.o_proj.weight_scale_inv"]
    assert whole_units(changed, NAMES, PACKED) == (
        f"{LAYER}.self_attn.o_proj.weight",
        f"{LAYER}.self_attn.o_proj.weight_scale_inv",
        f"{LAYER}.mlp.gate.weight",
        f"{LAYER}.mlp.gate.e_score_correction_bias",
    )


def test_expansion_is_idempotent_and_of_everything_is_everything() -> None:
    some = whole_units([NAMES[3]], NAMES, PACKED)
    assert whole_units(some, NAMES, PACKED) == some
    assert sorted(whole_units(NAMES, NAMES, PACKED)) == sorted(NAMES)


def test_layers_do_not_mix() -> None:
    assert unit_of("model.layers.11.self_attn.q_proj.weight", PACKED) == "model.layers.11.self_attn.qkv_proj"
    assert whole_units(["model.layers.11.self_attn.q_proj.weight"], NAMES, PACKED) == (NAMES[-1],)


def test_a_tensor_the_mirror_lacks_is_named() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        whole_units(["model.nonsense.weight"], NAMES, PACKED)


def test_a_rank_takes_its_own_experts_and_everything_else() -> None:
    here = {f"{LAYER}.mlp.experts": {0: -1, 1: 0, 2: -1}.__getitem__}
    kept = held_here(NAMES, here, PACKED)
    assert [name for name in NAMES if name not in kept] == [
        f"{LAYER}.mlp.experts.{e}.{p}_proj.weight" for e in (0, 2) for p in ("gate", "up", "down")
    ]
    assert held_here(NAMES, {}, PACKED) == list(NAMES)


def test_modules_that_the_model_took_nothing_of_are_named_but_for_those_of_the_mtp_layers() -> None:
    """`loaded` is what vLLM 0.32's Glm4Moe returns: merged modules, and experts below a child of theirs."""
    loaded = {
        "model.embed_tokens.weight",
        f"{LAYER}.self_attn.qkv_proj.weight",
        f"{LAYER}.mlp.experts.routed_experts.w13_weight",
        f"{LAYER}.mlp.shared_experts.down_proj.weight",
    }
    staged = [name for name in NAMES if "norm" not in name and "gate.w" not in name and "o_proj" not in name]
    assert untouched_units(units_of(staged, PACKED, layers=11), loaded) == [
        f"{LAYER}.mlp.gate",
        f"{LAYER}.mlp.shared_experts.gate_up_proj",
    ]
    one_more = units_of(staged, PACKED, layers=12)
    assert "model.layers.11.self_attn.qkv_proj" in untouched_units(one_more, loaded)
