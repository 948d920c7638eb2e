"""`jaxtrain inspect model`: names, files and meshes that it takes, and what it says about the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxtrain.cli import app
from jaxtrain.config.model import ModelSection

QUICKSTART = str(Path(__file__).parents[3] / "configs/quickstart.yaml")


def run(*arguments: str):
    return CliRunner().invoke(app, ["inspect", "model", *arguments])


def test_bytes_shrink_with_the_mesh_and_optimizer_state_is_that_of_muon_and_adamw():
    """tiny_llama on one device: float32 parameters and gradients; one moment a matrix, two for the rest."""
    sizes = {}
    for devices in (1, 4):
        result = run("tiny_llama", "--json", "--mesh", f"fsdp={devices}", "--vocabulary", "128")
        assert result.exit_code == 0, result.output
        sizes[devices] = json.loads(result.stdout)
    one, four = (sizes[devices]["bytes_per_device"] for devices in (1, 4))
    held = sizes[1]["parameters"]["total"]
    matrices = held - 128 * 128 - 5 * 128  # the tied embedding and 5 norms have AdamW
    assert one["parameters"] == one["gradients"] == 4 * held
    assert one["optimizer"] == pytest.approx(4 * (matrices + 2 * (held - matrices)), abs=64)
    assert one["total"] / 4 <= four["total"] < one["total"] / 3


def test_an_experiment_a_preset_and_a_config_json_are_the_same_model(tmp_path: Path):
    config = ModelSection.model_validate({"preset": "nano"}).hf_config(
        vocab_size=64, eos_token_id=1, pad_token_id=0
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = (("nano",), (QUICKSTART, "--vocabulary", "64"), (str(tmp_path),))
    found = [json.loads(run(*name, "--json").stdout) for name in names]
    assert found[0]["parameters"] == found[1]["parameters"] == found[2]["parameters"]
    assert found[0]["flops_per_token"] == found[1]["flops_per_token"] == found[2]["flops_per_token"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nano2"], "nano2: neither a preset (nano, "),
        (["nano", "--mesh", "rows=2"], "--mesh: 'rows=2' is not an axis (data, fsdp, expert, "),
        (["nano", "--mesh", "fsdp=0"], "--mesh: 'fsdp=0' is not an axis"),
        (["nano", "--mesh", "fsdp=7"], "dimension 1 ('embed') of size 128 is not divisible by 7"),
    ],
)
def test_what_cannot_be_is_named(arguments: list[str], problem: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert problem in result.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1, 2]", "holds list, expected an object"),
        ("{", "not JSON"),
        ('{"model_type": "llama", "vocab_size": 8}', "hidden_size"),
        ('{"model_type": "gpt2"}', "gpt2"),
    ],
)
def test_a_config_json_that_is_no_model_s(tmp_path: Path, text: str, problem: str):
    (tmp_path / "config.json").write_text(text)
    result = run(str(tmp_path))
    assert result.exit_code == 2 and problem in result.output


def test_the_vocabulary_of_an_experiment_is_that_of_its_start():
    """256 bytes, 5 special tokens and the words of the task's template, rounded up to a multiple of 64."""
    assert json.loads(run(QUICKSTART, "--json").stdout)["vocabulary"] == 320


def test_the_share_in_fp8_is_that_of_the_layout():
    def share(*more: str) -> float:
        return json.loads(run("glm-4.5-air", "--tensor-parallel", "2", *more, "--json").stdout)["fp8"][
            "share"
        ]

    assert (round(share(), 3), round(share("--no-expert-parallel"), 3)) == (0.98, 0.047)
