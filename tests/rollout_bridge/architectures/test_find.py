"""A family is found by its registered name or by reference, ours and a user's alike."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from rollout_bridge.architectures import REFERENCE, ArchitectureError, find, read, tensors, write
from rollout_bridge.references import INHERITED, search_path
from tests.jaxtrain.models.tiny import HF_CONFIGS

EXAMPLES = Path(__file__).parents[3] / "docs" / "extending" / "examples"
LLAMA = find("llama")


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A directory as that of a config file, and that of the example."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(INHERITED, "")
    search_path(EXAMPLES)
    search_path(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_a_reference_to_a_built_in_family_reads_as_its_name(name):
    config = HF_CONFIGS[name]
    reference = f"rollout_bridge.architectures.{config['model_type']}:ARCHITECTURE"
    referred, named = read(config | {REFERENCE: reference}), read(config)
    assert dataclasses.replace(referred, architecture=named.architecture) == named
    assert tensors(referred) == tensors(named)
    assert write(referred) == write(named) | {REFERENCE: reference}


def test_a_package_registers_a_family_under_its_model_type(beside):
    """As pip lays out a package's entry points; then neither config nor config.json has a reference."""
    information = beside / "theirs-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[jaxtrain.architectures]\nmixtral = mixtral:MIXTRAL\n")
    assert find("mixtral") is find("mixtral:MIXTRAL")
    written = write(dataclasses.replace(read(HF_CONFIGS["qwen3_moe"]), architecture="mixtral"))
    assert written["model_type"] == "mixtral" and REFERENCE not in written
    assert read(written).architecture == "mixtral"


def test_what_is_no_family_is_named(beside):
    with pytest.raises(ArchitectureError, match="'collections:OrderedDict': is .*, expected an Architecture"):
        find("collections:OrderedDict")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"implied": {}}, "missing: attention_bias, first_k_dense_replace, moe_intermediate_size"),
        ({"implied": LLAMA.implied | {"hidden_size": 1}}, "given twice: hidden_size"),
        ({"implied": LLAMA.implied | {"num_layers": 1}}, "unknown: num_layers"),
    ],
)
def test_a_family_that_is_not_whole_names_what_is_wrong(change, problem):
    with pytest.raises(ArchitectureError, match=f"model_type 'llama'.*{problem}"):
        dataclasses.replace(LLAMA, **change)
