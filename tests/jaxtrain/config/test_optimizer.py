"""Settings of the optimizer: what is allowed, and that each reaches the optimizer."""

from __future__ import annotations

import pytest

from jaxtrain.config.errors import ConfigError
from jaxtrain.optim.muon import MuonConfig
from jaxtrain.optim.newton_schulz import COEFFICIENTS, Algorithm, Normalization
from jaxtrain.optim.optimizer import AdamWConfig, Method, OptimizerConfig
from jaxtrain.optim.qk_clip import QkClip
from jaxtrain.training.build import clip_of, optimizer_config
from tests.jaxtrain.config.test_schema import quickstart


def test_the_defaults_are_the_optimizer_s_own() -> None:
    assert optimizer_config(quickstart().optimizer, head_dim=32, platform="cpu") == OptimizerConfig()


def test_every_setting_reaches_the_optimizer() -> None:
    settings = {
        "muon.momentum": 0.9,
        "muon.nesterov": False,
        "muon.newton_schulz_steps": 4,
        "muon.coefficients": "four_steps",
        "muon.algorithm": "gram",
        "muon.normalization": "schatten8",
        "muon.update_rms": 0.3,
        "muon.weight_decay": 0.01,
        "muon.momentum_dtype": "bfloat16",
        "muon.iteration_dtype": "bfloat16",
        "muon.split_heads": True,
        "adamw.b1": 0.8,
        "adamw.b2": 0.99,
        "adamw.eps": 1e-6,
        "adamw.weight_decay": 0.2,
        "lm_head_uses_muon": False,
        "overrides": "{'*/router/kernel': adamw, 'moe/*': frozen}",
    }
    config = quickstart(*(f"optimizer.{name}={value}" for name, value in settings.items()))
    assert optimizer_config(config.optimizer, head_dim=32, platform="cpu") == OptimizerConfig(
        muon=MuonConfig(
            momentum=0.9,
            nesterov=False,
            newton_schulz_steps=4,
            coefficients="four_steps",
            algorithm=Algorithm.gram,
            normalization=Normalization.schatten8,
            update_rms=0.3,
            weight_decay=0.01,
            momentum_dtype="bfloat16",
            iteration_dtype="bfloat16",
            split_heads=32,
        ),
        adamw=AdamWConfig(b1=0.8, b2=0.99, eps=1e-6, weight_decay=0.2),
        lm_head=Method.adamw,
        overrides={"*/router/kernel": Method.adamw, "moe/*": Method.frozen},
    )


@pytest.mark.parametrize(
    ("platform", "setting", "expected"),
    [
        ("cpu", "auto", "float32"),
        ("gpu", "auto", "bfloat16"),
        ("tpu", "auto", "bfloat16"),
        ("cpu", "bfloat16", "bfloat16"),
        ("gpu", "auto, coefficients: four_steps", "float32"),
        ("tpu", "float32", "float32"),
    ],
)
def test_muon_iterates_in_bfloat16_on_accelerators_unless_forced(platform, setting, expected) -> None:
    section = quickstart(f"optimizer={{muon: {{iteration_dtype: {setting}}}}}").optimizer
    assert optimizer_config(section, head_dim=32, platform=platform).muon.iteration_dtype == expected


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_every_set_of_coefficients_can_be_named(name: str) -> None:
    assert quickstart(f"optimizer.muon.coefficients={name}").optimizer.muon.coefficients == name


def test_qk_clip_knows_the_stacks_of_the_model() -> None:
    config = quickstart("model.use_qk_norm=false", "optimizer.muon.qk_clip=100")
    model = config.model.decoder(vocab_size=64)
    assert config.optimizer.muon.qk_clip == 100.0
    assert clip_of(model, 100.0) == QkClip(
        threshold=100.0,
        key_heads=model.num_key_value_heads,
        stacks=(("dense", model.first_k_dense_replace), ("moe", model.num_moe_layers)),
    )
    assert quickstart().optimizer.muon.qk_clip is None


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["optimizer.muon.qk_clip=100", "model.use_qk_norm=true"],
            "optimizer.muon.qk_clip: 100 has no effect with model.use_qk_norm",
        ),
        (
            ["optimizer.muon.coefficients=four_steps", "optimizer.muon.newton_schulz_steps=3"],
            "optimizer.muon.newton_schulz_steps: 3 cuts coefficients four_steps off; expected at least 4",
        ),
        (
            ["optimizer.muon.algorithm=fast"],
            "optimizer.muon.algorithm: 'fast' is not one of direct, gram",
        ),
        (
            ["optimizer.muon.iteration_dtype=float16"],
            "optimizer.muon.iteration_dtype: 'float16' is not one of auto, float32, bfloat16",
        ),
        (
            ["optimizer.overrides={'*/router/kernel': sgd}"],
            "optimizer.overrides.*/router/kernel: 'sgd' is not one of 'muon', 'adamw' or 'frozen'",
        ),
    ],
)
def test_what_cannot_work_names_its_field(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quickstart(*overrides)
    assert problem in str(caught.value)
