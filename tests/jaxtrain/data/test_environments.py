"""The environment of a config: a recipe may have none, and then what reads one says so."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import yaml

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.data.environments import open_environment
from jaxtrain.data.sources.base import SourceTools
from jaxtrain.data.sources.worked_answers import WorkedAnswers

ROOT = Path(__file__).parents[3]


def test_worked_answers_of_a_run_without_an_environment_say_what_is_missing(tmp_path: Path) -> None:
    """Supervised training has no environment of its own: the file names it, or another source."""
    values = yaml.safe_load((ROOT / "configs/sft.yaml").read_text())
    del values["environment"]
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    config = load_config(tmp_path / "sft.yaml")
    tools = SourceTools(tokenizer=None, seed=0, environment=partial(open_environment, config))
    with pytest.raises(ConfigError, match="environment: missing; give one, or name a source that reads none"):
        WorkedAnswers().open(tools)
