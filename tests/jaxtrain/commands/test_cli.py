"""The command line: help for everyone, refusals with a status, and nothing heavy before it is needed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import uuid
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from jaxtrain.cli import app
from jaxtrain.commands.train import go_on_from
from jaxtrain.config.load import load_config
from jaxtrain.config.resume import claim_run
from jaxtrain.quickstart.next_steps import ending
from jaxtrain.training.steps import saved_steps

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
COMMANDS = ["quickstart", "train", "rollout", "serve", "report", "inspect"]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_lists_every_command_with_what_it_does() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "New here? Run: jaxtrain quickstart" in result.output
    assert all(f"│ {command}" in result.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_its_options(command: str) -> None:
    result = run(*({"inspect": "inspect config"}.get(command, command).split()), "--help")
    assert result.exit_code == 0
    assert "The experiment, a YAML file." in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_config_starts_nothing(command: str) -> None:
    result = run(command, "--config", QUICKSTART, "rl.steps=many")
    assert result.exit_code == 2
    assert result.stderr == "command line: rl.steps: 'many' is not a whole number in [0, inf)\n"


def test_check_says_what_would_run(tmp_path: Path) -> None:
    result = run("train", "--config", QUICKSTART, "--check", "--name", "mine", f"runs_dir={tmp_path}")
    assert result.exit_code == 0
    assert result.stdout == f"{QUICKSTART}: ok (async_grpo, run 'mine' in {tmp_path}/mine)\n"
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "environment.task=spel_backward",
            "task: 'spel_backward' is none of the 106 datasets of reasoning-gym; did you mean 'spell_bac",
        ),
        ("environment.name=gym", "name: environment 'gym' is unknown. Known: reasoning_gym"),
        ("environment.options.colour=red", "options: spell_backward refuses"),
        ("environment.options.length={a: 1}", "options: spell_backward refuses"),
        ("environment.colour=red", "colour: unknown key; allowed here: task, options"),
    ],
)
def test_an_environment_that_does_not_exist_is_refused_by_check(override: str, problem: str) -> None:
    result = run("train", "--config", QUICKSTART, "--check", override)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"command line: environment.{problem}")


def test_evaluations_need_as_many_tasks_as_the_environment_holds_out() -> None:
    result = run("train", "--config", QUICKSTART, "--check", "evaluation.prompts=257")
    assert result.exit_code == 2
    assert result.stderr.startswith("command line: evaluation.prompts: 257 is more than the 256 tasks that ")


def test_a_recipe_without_plans_has_none_to_discard(tmp_path: Path) -> None:
    sft = str(ROOT / "configs/sft.yaml")
    result = run("train", "--config", sft, "--discard-plans-after", "3", f"runs_dir={tmp_path}")
    assert result.exit_code == 2
    assert result.stderr == "--discard-plans-after: recipe 'sft' has no plans\n"


OURS = """
from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.config.schema import AsyncGrpoConfig


class Recipe(AsyncGrpoConfig):
    program: ClassVar[str] = "elsewhere:run"


@dataclass(frozen=True)
class Source:
    columns = frozenset()

    def open(self, tools):
        raise NotImplementedError
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own in `tmp_path`, found from there only."""
    name = f"ours_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(OURS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAXTRAIN_SEARCH_PATH", "")
    return name


def test_a_recipe_of_ones_own_has_plans_if_it_extends_async_grpo(module: str, tmp_path: Path) -> None:
    """What is refused is what comes next, a store that cannot be opened; no run is begun."""
    config = tmp_path / "ours.yaml"
    config.write_text(Path(QUICKSTART).read_text().replace("recipe: async_grpo", f"recipe: {module}:Recipe"))
    result = run(
        "train",
        "--config",
        str(config),
        "--discard-plans-after",
        "3",
        f"runs_dir={tmp_path}",
        f"store=file://{tmp_path}/missing/store",
    )
    assert (result.exit_code, result.stderr.startswith("StoreError: ")) == (1, True)
    assert "missing/store" in result.stderr and not (tmp_path / "quickstart").exists()


def test_a_source_of_ones_own_needs_no_environment(module: str, tmp_path: Path) -> None:
    """None is opened. One that the config names is, by the same check."""
    config = tmp_path / "ours.yaml"
    values = yaml.safe_load((ROOT / "configs/sft.yaml").read_text())
    del values["environment"]
    values["sft"]["source"] = {"name": f"{module}:Source"}
    config.write_text(yaml.safe_dump(values))
    result = run("train", "--config", str(config), "--check", f"runs_dir={tmp_path}")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{config}: ok (sft,")
    result = run("train", "--config", str(config), "--check", "environment.name=gym")
    assert (result.exit_code, result.stderr.startswith("command line: environment.name: ")) == (2, True)


def test_inspect_shows_values_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = run("inspect", "--config", QUICKSTART, "trajectories.max_lag=3")
    [line] = [text for text in result.stdout.splitlines() if "trajectories.max_lag" in text]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "*",
        "trajectories.max_lag",
        "3",
        "optimizer steps a token may lag; staler ones are masked",
    ]


def test_a_report_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    result = run("report", "--config", QUICKSTART, f"runs_dir={tmp_path}")
    assert result.exit_code == 1
    assert f"{tmp_path}/quickstart: no such run." in result.stderr


def test_help_and_refusals_load_no_numerical_library() -> None:
    program = """
import sys
from typer.testing import CliRunner
from jaxtrain.cli import app
for arguments in (["--help"], ["train", "--config", sys.argv[1], "x=1"]):
    print(CliRunner().invoke(app, arguments).exit_code)
print([module for module in ("jax", "numpy", "transformers", "torch") if module in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", program, QUICKSTART],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert result.stdout.split() == ["0", "2", "[]"]


def test_a_report_without_the_store_writes_nothing(tmp_path: Path) -> None:
    """Neither over the summary that is there, nor an empty store."""
    run_dir = tmp_path / "quickstart"
    run_dir.mkdir()
    (run_dir / "summary.json").write_text("{}")
    result = run("report", "--config", QUICKSTART, f"runs_dir={tmp_path}")
    assert (result.exit_code, "the store of" in result.stderr) == (1, True)
    (run_dir / "store").mkdir()
    result = run("report", "--config", QUICKSTART, f"runs_dir={tmp_path}")
    assert (result.exit_code, "holds no run" in result.stderr) == (1, True)
    assert sorted(path.name for path in run_dir.iterdir()) == ["store", "summary.json"]
    assert (run_dir / "summary.json").read_text() == "{}"


def test_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    """Later ones are renamed; a step that is not there is refused with those that are."""
    checkpoints = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        (checkpoints / str(step)).mkdir(parents=True)
    with pytest.raises(typer.Exit) as refused:
        go_on_from(checkpoints, 15)
    assert refused.value.exit_code == 2 and saved_steps(checkpoints) == [10, 20, 30]
    go_on_from(checkpoints, 10)
    assert saved_steps(checkpoints) == [10]
    assert sorted(path.name.rpartition("-")[0] for path in checkpoints.glob("unused-*")) == [
        "unused-20",
        "unused-30",
    ]


@pytest.mark.parametrize(
    "command", [("inspect", "--config", QUICKSTART), ("inspect", "model", "glm-4.5-air")]
)
def test_a_table_is_never_cut_where_nobody_looks(command: tuple[str, ...], monkeypatch) -> None:
    """Piped, every row is one line, however long."""
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = run(*command).stdout.splitlines()
    assert max(map(len, lines)) > 80 or command[1] == "model"
    assert not [line for line in lines if "…" in line]
    if command[1] != "model":
        [line] = [line for line in lines if " trajectories.wait_timeout_s" in line]
        assert "how long a step waits for trajectories, a server's start included" in line


def test_inspect_prints_json() -> None:
    found = json.loads(run("inspect", "--config", QUICKSTART, "--json", "rl.steps=7").stdout)
    assert found["rl"]["steps"] == 7 and found["trajectories"]["max_lag"] == 8
    assert run("inspect", "--config", QUICKSTART, "--check").stdout.startswith(
        f"{QUICKSTART}: ok (async_grpo"
    )


def test_the_version_is_the_installed_ones() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"jaxtrain {version('jaxtrain')}\n")


def test_shells_can_complete() -> None:
    assert "--install-completion" in run("--help").output


def test_a_task_that_is_none_prints_no_catalogue() -> None:
    result = run("train", "--config", QUICKSTART, "--check", "environment.task=nosuch")
    assert result.exit_code == 2 and len(result.stderr) < 200
    assert "'nosuch' is none of the" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "--config", QUICKSTART, "--check", "model.preset=nanno"], "'nano'"),
        (["inspect", "model", "glm-4.5-aire"], "'glm-4.5-air'"),
        (["train", "--config", QUICKSTART, "--check", "recipe=async_grop"], "'async_grpo'"),
        (["train", "--config", QUICKSTART, "--check", "environment.name=reasoning_gim"], "'reasoning_gym'"),
        (["report", "--config", QUICKSTART, "runs_dir=RUNS", "--name", "mime"], "'mine'"),
        (["inspect", "RUNS/mime"], "'mine'"),
    ],
)
def test_a_name_that_is_nearly_right_gets_a_suggestion(
    arguments: list[str], meant: str, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    result = run(*(argument.replace("RUNS", str(tmp_path)) for argument in arguments))
    assert result.exit_code in (1, 2)
    assert f"did you mean {meant}?" in result.stderr


def a_run(tmp_path: Path, *overrides: str) -> Path:
    """A directory of a run that has taken 3 of 4 steps and saved after the second."""
    given = [f"runs_dir={tmp_path}", "name=mine", "sft.steps=4", *overrides]
    run_dir = claim_run(load_config(ROOT / "configs/sft.yaml", given))
    (run_dir / "checkpoints/2").mkdir(parents=True)
    rows = [{"phase": "sft", "step": step, "time": 100.0} for step in (1, 2, 3)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "logs").mkdir()
    (run_dir / "logs/trainer.log").write_text("INFO started\nMemoryError: 3 GiB\n")
    return run_dir


def test_a_runs_directory_says_what_it_is_and_how_far_it_has_come(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    result = run("inspect", str(run_dir), "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["problems"]) == (0, [])
    assert found["is"] == f"{run_dir}: run 'mine' of recipe sft"
    facts = found["facts"]
    assert (facts["steps"], facts["checkpoints"]) == ("sft 3 of 4", "2")
    assert facts["a start"] == "goes on after step 2" and facts["end of the log"] == "MemoryError: 3 GiB"
    assert facts["runs"] == "no: no process holds its lock"
    shown = run("inspect", str(run_dir)).stdout
    assert "sft 3 of 4" in shown and "MemoryError" in shown
    listed = run("inspect", str(tmp_path)).stdout
    assert listed.startswith(f"{tmp_path}: a directory of runs: mine\n")


def test_a_runs_directory_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    (run_dir / "checkpoints/2").rmdir()
    result = run("inspect", str(run_dir))
    assert result.exit_code == 1
    assert "problem: steps were made and no checkpoint is there" in result.stdout
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("{broken\n{}\n")
    assert "problem: " in run("inspect", str(run_dir)).stdout
    (run_dir / "config.yaml").write_text("recipe: [")
    result = run("inspect", str(run_dir))
    assert (result.exit_code, "config.yaml: not YAML" in result.stdout) == (1, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty}: no run, model or store" in run("inspect", str(empty)).stdout


@pytest.mark.parametrize("config", ["sft", "quickstart"])
def test_a_run_ends_with_what_it_made_and_three_commands_that_exist(config: str, tmp_path: Path) -> None:
    experiment = load_config(ROOT / f"configs/{config}.yaml", [f"runs_dir={tmp_path}", "name=mine"])
    (tmp_path / "mine/checkpoints/20").mkdir(parents=True)
    [made, *commands] = ending(experiment).splitlines()
    assert f"Run 'mine' is in {tmp_path}/mine: checkpoints of steps 20." in made
    assert len(commands) == 3
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "jaxtrain"
        assert run(*arguments, "--help").exit_code == 0
