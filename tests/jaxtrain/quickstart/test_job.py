"""The main job with stand-ins for its processes: how it ends, what it says, and that it resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.quickstart.child import ChildSpec
from jaxtrain.quickstart.job import run
from jaxtrain.quickstart.takeover import TakeoverError, owned
from rollout_bridge.store import StoreError
from tests.jaxtrain.quickstart.stand_ins import OBEDIENT, spec

ROOT = Path(__file__).parents[3]

# Takes the two RL steps of the config, evaluates before and after, and says that it is finished.
TRAINER = """
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
rows = [
    {"phase": "rl", "step": step, "time": 100.0 + step, "loss": 0.5, "reward_mean": 0.25 * step, "tokens": 60,
     "step_seconds": 2.0, "wait_seconds": 1.0, "update_rms": 1e-4 * step}
    for step in (1, 2)
]
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
for version, reward in ((9, 0.75), (2, 0.25)):
    directory = run / f"store/evaluations/at-{version}"
    directory.mkdir(parents=True)
    result = {"id": f"at-{version}", "version": version, "prompts": [0, 200], "count": 200, "failed": 0,
              "reward_mean": reward, "components": {"exact": reward - 0.25}, "mean_tokens": 9.0,
              "truncated": 50, "worker": "w", "time": 1.0}
    (directory / "result.json").write_text(json.dumps(result))
(run / "store/control").mkdir()
state = {"phase": "finished", "step": 2, "rl_step": 2, "version": 9, "time": 103.0}
(run / "store/control/state.json").write_text(json.dumps(state))
"""


def config(tmp_path: Path, *overrides: str) -> AsyncGrpoConfig:
    loaded = load_config(
        ROOT / "configs/quickstart.yaml",
        [f"runs_dir={tmp_path}", "name=x", "rl.steps=2", "processes.stop_timeout_s=2", *overrides],
    )
    assert isinstance(loaded, AsyncGrpoConfig)
    return loaded


def composed(**programs: str) -> Callable[[AsyncGrpoConfig, Path], list[ChildSpec]]:
    """Processes by name, `_` for `-`."""
    return lambda _config, run_dir: [
        spec(name.replace("_", "-"), run_dir, program) for name, program in programs.items()
    ]


def nothing(_config: AsyncGrpoConfig, _run_dir: Path) -> list[ChildSpec]:
    raise AssertionError("a finished run starts nothing")


def test_a_run_ends_with_its_summary_and_stays_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "x"
    assert run(config(tmp_path), processes=composed(trainer=TRAINER, worker_0=OBEDIENT)) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["engine"] == "embedded"
    assert (summary["reward_before"], summary["reward_after"]) == (0.25, 0.75)
    assert summary["exact"] == {"greedy_before": 0.0, "greedy_after": 0.5}
    assert summary["truncated_after"] == 0.25
    assert summary["train_tokens_per_s"] == 30.0  # 120 tokens in 4 s
    assert summary["update_rms_mean"] == pytest.approx(1.5e-4)
    assert summary["trajectories"]["written"] == 0
    assert summary["seconds"] > 0
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())  # a cell may be two lines
    assert "exact 0 -> 0.5, reward 0.25 -> 0.75, 0.25 cut off after" in said

    assert run(config(tmp_path), processes=nothing) == 0
    said = capsys.readouterr().out
    assert "is finished" in said
    assert "0.25 -> 0.75" in said


def test_more_steps_than_it_has_taken_make_a_finished_run_go_on(tmp_path: Path) -> None:
    run(config(tmp_path), processes=composed(trainer=TRAINER))
    started: list[str] = []

    def longer(_config: AsyncGrpoConfig, run_dir: Path) -> list[ChildSpec]:
        started.append("trainer")
        return [spec("trainer", run_dir, "pass")]

    assert run(config(tmp_path, "rl.steps=3"), processes=longer) == 1  # this trainer takes no step
    assert started == ["trainer"]


def test_a_dead_worker_is_named_with_its_log_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = "import sys; print('StoreError: store file:///x: gone', file=sys.stderr); sys.exit(4)"
    assert run(config(tmp_path), processes=composed(trainer=OBEDIENT, worker_0=dying)) == 1
    said = capsys.readouterr().err
    assert f"worker-0: exit status 4. Log: {tmp_path}/x/logs/worker-0.log" in said
    assert "  | StoreError: store file:///x: gone" in said
    assert "run the same command again: it resumes" in said


def test_a_trainer_that_leaves_early_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config(tmp_path), processes=composed(trainer="pass")) == 1
    assert "trainer: left before the end of the run." in capsys.readouterr().err


def test_a_store_that_cannot_be_opened_does_not_bind_the_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="/missing/store"):
        run(config(tmp_path, f"store=file://{tmp_path}/missing/store"), processes=nothing)
    assert run(config(tmp_path), processes=composed(trainer=TRAINER)) == 0


def test_other_settings_under_the_same_name_are_refused(tmp_path: Path) -> None:
    run(config(tmp_path), processes=composed(trainer=TRAINER))
    with pytest.raises(ConfigError, match="seed: the run was started with 0, now 5"):
        run(config(tmp_path, "seed=5"), processes=nothing)


def test_a_start_with_other_settings_leaves_a_live_run_alone(tmp_path: Path) -> None:
    """Before its first step nothing binds a run to its settings, but whoever holds its lock does."""
    run(config(tmp_path), processes=composed(trainer="pass"))  # started, no step made
    run_dir = tmp_path / "x"
    before = sorted(path.name for path in run_dir.iterdir())
    saved = (run_dir / "config.yaml").read_text()
    with (
        owned(run_dir, stop_timeout_s=2),
        pytest.raises(TakeoverError, match=f"process {os.getpid()} on .* runs this already"),
    ):
        run(config(tmp_path, "seed=5"), processes=nothing)
    assert (run_dir / "config.yaml").read_text() == saved
    assert sorted(path.name for path in run_dir.iterdir()) == before
    assert run(config(tmp_path, "seed=5"), processes=composed(trainer="pass")) == 1  # nobody holds it
    assert "seed: 5" in (run_dir / "config.yaml").read_text()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runs_dir: .*/file/x cannot be written .*name another directory"):
        run(config(tmp_path, f"runs_dir={tmp_path}/file"), processes=nothing)
