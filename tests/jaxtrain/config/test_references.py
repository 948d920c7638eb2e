"""Config values that name code: what they build, from where, and what each wrong one says."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jaxtrain.config import references
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.config.resume import claim_run
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.losses.next_token import NextToken
from jaxtrain.losses.policies.double_sided import DoubleSided
from jaxtrain.rl.advantages.group_mean import GroupMean
from jaxtrain.rl.filters.no_signal import NoSignal
from tests.jaxtrain.config.test_errors import MINIMAL

OURS = """
from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtrain.config.base import Reference, named, required, setting
from jaxtrain.config.schema import ExperimentConfig
from jaxtrain.data.batch import Column


@dataclass(frozen=True)
class Loss:
    strength: float = 1.0
    columns: tuple = ()

    def __call__(self, definition, params, batch):
        raise NotImplementedError


@dataclass(frozen=True)
class Margin(Loss):
    columns: tuple = (Column("margin", "float32", 0.0, of="target"),)


@dataclass(frozen=True)
class Margins:
    columns: frozenset = frozenset({"margin"})

    def open(self, tools):
        raise NotImplementedError


class Recipe(ExperimentConfig):
    program: ClassVar[str] = "elsewhere:run"
    beta: float = required("of the recipe")
    reward: Annotated[Reference, named("double_sided")] | None = setting(
        Reference(name="double_sided"), "of the recipe", reference="loss"
    )


class NoRecipe:
    pass
"""


@pytest.fixture
def rl_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid config that names no code."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rl.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


@pytest.fixture
def module(tmp_path: Path) -> Iterator[str]:
    """A module of the user's own beside the config file, not imported before."""
    name, searched = f"ours_{uuid.uuid4().hex}", list(sys.path)
    (tmp_path / f"{name}.py").write_text(OURS)
    yield name
    sys.path[:] = searched
    sys.modules.pop(name, None)


def load(path: Path, *overrides: str) -> AsyncGrpoConfig:
    config = load_config(path, overrides)
    assert isinstance(config, AsyncGrpoConfig)
    return config


def problems_of(path: Path, *overrides: str) -> list[str]:
    config = load_config(path, overrides)
    with pytest.raises(ConfigError) as caught:
        references.check(config)
    return caught.value.problems


def test_the_defaults_are_named_and_build(rl_yaml: Path) -> None:
    config = load(rl_yaml)
    references.check(config)
    found = list(references.references_of(config))
    assert all(default for *_, default in found)
    named = {where: (kind, reference.name) for where, kind, reference, _ in found}
    assert named == {
        "warm_start.loss": ("loss", "next_token"),
        "warm_start.source": ("source", "worked_answers"),
        "rl.loss": ("loss", "double_sided"),
        "rl.advantage": ("advantage", "group_mean"),
        "trajectories.filters.0": ("filter", "no_signal"),
    }
    built = [references.build(kind, reference, where=where) for where, kind, reference, _ in found]
    assert [one for one in built if not hasattr(one, "open")] == [
        NextToken(),
        DoubleSided(),
        GroupMean(),
        NoSignal(),
    ]


def test_options_without_a_name_are_those_of_the_default(rl_yaml: Path) -> None:
    config = load(rl_yaml, "rl.loss.eps_low=0.3", "rl.advantage={divide_by_std: true}")
    assert references.build("loss", config.rl.loss, where="rl.loss") == DoubleSided(eps_low=0.3)
    assert references.build("advantage", config.rl.advantage, where="rl.advantage") == GroupMean(
        divide_by_std=True
    )


def test_a_name_may_be_written_as_text(rl_yaml: Path) -> None:
    config = load(rl_yaml, "rl.loss=next_token", "trajectories.filters=[no_signal]")
    assert references.build("loss", config.rl.loss, where="rl.loss") == NextToken()
    assert [rule.name for rule in config.trajectories.filters] == ["no_signal"]


def test_a_run_saves_what_was_named_with_its_options(rl_yaml: Path, tmp_path: Path) -> None:
    config = load(rl_yaml, "rl.loss.eps_low=0.3", f"runs_dir={tmp_path / 'runs'}")
    run_dir = claim_run(config)
    assert load(run_dir / "config.yaml") == config
    (run_dir / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"rl\.loss.*the run was started with"):
        claim_run(load(rl_yaml, "rl.loss.eps_low=0.4", f"runs_dir={tmp_path / 'runs'}"))


def test_every_wrong_reference_is_named_at_once(rl_yaml: Path) -> None:
    unknown, option, value, filters = problems_of(
        rl_yaml,
        "warm_start.loss=next_tokens",
        "rl.loss={name: double_sided, eps_lwo: 0.3}",
        "rl.advantage.divide_by_std=1",
        "trajectories.filters=[no_signal, {name: no_signal, keep: 1}]",
    )
    assert unknown.startswith(
        "warm_start.loss.name: loss 'next_tokens' is unknown; did you mean 'next_token'? Known: double_sided,"
    )
    assert option == "rl.loss.eps_lwo: unknown key; did you mean 'eps_low'?"
    assert value.startswith("rl.advantage.divide_by_std: 1 is not true or false")
    assert filters.startswith("trajectories.filters.1.keep: unknown key")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rl.loss.eps_low=0", "rl.loss.eps_low: 0.0 is not in (0, 1]"),
        ("rl.loss.eps_high=none", "rl.loss.eps_high: 'none' is not a number"),
        (
            "rl.loss=pathlib:Path",
            "rl.loss.name: rl.loss: <class 'pathlib.Path'> declares options, but it is not a dataclass",
        ),
        ("rl.loss=os:getcwdd", "did you mean 'getcwd'?"),
    ],
)
def test_a_wrong_reference_names_its_field(rl_yaml: Path, override: str, problem: str) -> None:
    [found] = problems_of(rl_yaml, override)
    assert problem in found


def test_code_of_ones_own_lies_beside_the_config_file(
    rl_yaml: Path, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever the command runs, and again from the config that the run has saved elsewhere."""
    monkeypatch.chdir("/")
    config = load(rl_yaml, f"rl.loss={{name: '{module}:Loss', strength: 2}}", f"runs_dir={tmp_path}/runs")
    loss = references.build("loss", config.rl.loss, where="rl.loss")
    assert (type(loss).__name__, loss.strength) == ("Loss", 2.0)
    saved = load(claim_run(config) / "config.yaml")
    assert saved.modules == str(tmp_path) and saved == config
    [problem] = problems_of(rl_yaml, f"rl.loss={{name: '{module}:Loss', strenght: 2}}")
    assert problem == "rl.loss.strenght: unknown key; did you mean 'strength'?"


def test_a_recipe_of_ones_own_is_a_config_with_its_own_fields(rl_yaml: Path, module: str) -> None:
    values = {name: MINIMAL[name] for name in ("model", "batch")} | {"recipe": f"{module}:Recipe"}
    rl_yaml.write_text(yaml.safe_dump(values | {"beta": 0.5}))
    config = load_config(rl_yaml)
    assert (type(config).__name__, config.program, config.model_dump()["beta"]) == (
        "Recipe",
        "elsewhere:run",
        0.5,
    )
    rl_yaml.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"rl\.yaml: beta: missing; a value is required \(of the recipe\)"):
        load_config(rl_yaml)


def test_a_loss_reads_only_columns_that_its_data_has(rl_yaml: Path, module: str) -> None:
    """Worked answers have none besides the standard ones, plans no margin, and the own source has one."""
    assert problems_of(rl_yaml, "warm_start.loss=double_sided", f"rl.loss={module}:Margin") == [
        "warm_start.loss: reads behavior_logprobs, advantages, temperature, which this phase's data does not "
        "have (it has no further columns); name another loss",
        "rl.loss: reads margin, which this phase's data does not have (it has advantages, behavior_logprobs, "
        "routed_experts, temperature); name another loss",
    ]
    references.check(load(rl_yaml, f"warm_start.loss={module}:Margin", f"warm_start.source={module}:Margins"))


@pytest.mark.parametrize(
    ("field", "name", "missing"),
    [
        ("rl.loss", "jaxtrain.rl.filters.no_signal:NoSignal", "columns, __call__"),
        ("rl.advantage", "jaxtrain.rl.filters.no_signal:NoSignal", "of_group, of_tokens"),
        ("trajectories.filters", "jaxtrain.rl.advantages.group_mean:GroupMean", "reason, keep"),
        ("warm_start.source", "jaxtrain.losses.next_token:NextToken", "open"),
    ],
)
def test_a_class_of_another_kind_is_refused_by_name(
    rl_yaml: Path, field: str, name: str, missing: str
) -> None:
    """Once, also where the loss beside a source is looked at for it."""
    several = field == "trajectories.filters"
    [problem] = problems_of(rl_yaml, f"{field}=[{name}]" if several else f"{field}={name}")
    assert problem.startswith(f"{field}{'.0' if several else ''}.name: {name!r} has no {missing}, which ")


def test_defaults_build_nothing(rl_yaml: Path) -> None:
    """A config that names no code is checked without jax, which every loss and source imports."""
    program = (
        "import sys; from jaxtrain.config.load import load_config; from jaxtrain.config import references;"
        "references.check(load_config(sys.argv[1])); print([m for m in ('jax', 'grain') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(rl_yaml)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert result.stdout == "[]\n"


def test_an_optional_reference_may_be_null(rl_yaml: Path, module: str) -> None:
    """Here one that has a default: null names nothing, and a wrong name is still found."""
    values = {name: MINIMAL[name] for name in ("model", "batch")}
    rl_yaml.write_text(yaml.safe_dump(values | {"recipe": f"{module}:Recipe", "beta": 0.5}))
    assert [found[:2] for found in references.references_of(load_config(rl_yaml))] == [("reward", "loss")]
    absent = load_config(rl_yaml, ["reward=null"])
    references.check(absent)
    assert list(references.references_of(absent)) == []
    [problem] = problems_of(rl_yaml, "reward=next_tokens")
    assert problem.startswith("reward.name: loss 'next_tokens' is unknown")


@pytest.mark.parametrize("given", ["code", None], ids=["relative", "null"])
def test_the_directory_of_modules_is_absolute(
    rl_yaml: Path, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    """A relative one is of the working directory, null is the config file's directory."""
    expected = tmp_path / "code" if given else tmp_path
    if given:
        expected.mkdir()
        (tmp_path / f"{module}.py").rename(expected / f"{module}.py")
    rl_yaml.write_text(yaml.safe_dump(MINIMAL | {"modules": given}))
    config = load(Path(rl_yaml.name), f"rl.loss={module}:Loss")
    assert config.modules == str(expected)
    monkeypatch.chdir("/")  # where a process of the run may be
    assert type(references.build("loss", config.rl.loss, where="rl.loss")).__name__ == "Loss"


def test_a_recipe_that_is_no_config_is_refused(rl_yaml: Path, module: str) -> None:
    with pytest.raises(ConfigError, match="NoRecipe'>, not a subclass of ExperimentConfig"):
        load_config(rl_yaml, [f"recipe={module}:NoRecipe"])
    with pytest.raises(ConfigError, match="command line: recipe: .*cannot import nowhere_at_all"):
        load_config(rl_yaml, ["recipe=nowhere_at_all:Recipe"])
