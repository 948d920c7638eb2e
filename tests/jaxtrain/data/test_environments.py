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
    """At loading, where the config names them; by the source itself, where another recipe uses it."""
    values = yaml.safe_load((ROOT / "configs/sft.yaml").read_text())
    del values["environment"]
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="environment: missing; sft.source worked_answers reads its tasks"):
        load_config(path)
    config = load_config(path, ["sft.source={name: elsewhere}"])
    tools = SourceTools(tokenizer=None, seed=0, environment=partial(open_environment, config))
    with pytest.raises(ConfigError, match="environment: missing; give one, or name a source that reads none"):
        WorkedAnswers().open(tools)
