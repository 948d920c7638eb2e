"""What a run opens, and what it says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.training.run import open_run

ROOT = Path(__file__).parents[3]


def test_a_run_without_an_environment_opens_none_for_its_tokenizer(tmp_path: Path) -> None:
    """Where no tokenizer is given, one would be built from prompts: the tokenizer is what is missing."""
    values = yaml.safe_load((ROOT / "configs/sft.yaml").read_text())
    del values["environment"]
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    config = load_config(tmp_path / "sft.yaml", ["sft.source={name: elsewhere}"])
    with pytest.raises(ConfigError, match=r"^tokenizer\.path: "), open_run(config, tmp_path / "run"):
        pass
