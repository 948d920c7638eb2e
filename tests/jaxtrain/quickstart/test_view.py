"""What is shown while a run goes on comes from the rows of its metrics alone."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.quickstart.progress import ProgressReader, RunProgress, progress
from jaxtrain.quickstart.view import clock, kilobytes, line, live_view, panel

ROOT = Path(__file__).parents[3]


def config() -> AsyncGrpoConfig:
    loaded = load_config(ROOT / "configs/quickstart.yaml", ["warm_start.steps=2", "rl.steps=3"])
    assert isinstance(loaded, AsyncGrpoConfig)
    return loaded


def row(phase: str, step: int, **values: float) -> dict:
    return {
        "phase": phase,
        "step": step,
        "time": 100.0,
        "loss": 1.0,
        "tokens": 100,
        "step_seconds": 1.5,
        "wait_seconds": 0.5,
    } | values


WARM = [row("warm_start", 1), row("warm_start", 2)]
RL = row(
    "rl",
    3,
    reward_mean=0.25,
    lag_mean=1.5,
    lag_max=3,
    version=1,
    delta_bytes=2000,
    delta_reference_bytes=1600,
)


def test_before_the_first_step() -> None:
    assert progress([], config()) == RunProgress(phase="starting")


def test_steps_and_times_are_of_the_phase() -> None:
    now = progress([*WARM, RL], config())
    assert (now.phase, now.step, now.steps) == ("rl", 1, 3)
    assert now.tokens_per_s == 50.0  # 100 tokens in 1.5 s of work and 0.5 s of waiting
    assert now.seconds_left == 4.0  # two more steps of 2 s


def test_a_full_version_is_no_delta() -> None:
    full = RL | {"step": 4, "delta_bytes": 1_000_000, "delta_reference_bytes": 0}
    assert progress([*WARM, RL, full], config()).delta_bytes == 2000


def test_between_the_phases_the_fleet_starts() -> None:
    assert progress(WARM, config()).phase == "first_rollouts"


def test_the_last_step_is_the_end() -> None:
    rows = [*WARM, RL, RL | {"step": 4}, RL | {"step": 5}]
    assert progress(rows, config()).phase == "done"


def test_a_step_that_published_nothing_keeps_the_last_delta() -> None:
    now = progress(
        [*WARM, RL, RL | {"step": 4, "delta_bytes": None, "delta_reference_bytes": None}], config()
    )
    assert now.delta_bytes == 2000


def test_the_line_for_a_log() -> None:
    assert line(progress([*WARM, RL], config()), elapsed_s=65) == (
        "[1:05] asynchronous RL 1/3  loss 1.000  reward 0.250  lag 1.50 (max 3)  version 1  "
        "delta 2 kB (1.25x entropy)  tokens/s 50  left 0:04"
    )


def test_the_panel_shows_the_same_facts() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(panel(progress([*WARM, RL], config()), name="mine", elapsed_s=65))
    text = console.file.getvalue()
    for fact in ("mine", "asynchronous RL 1/3", "1:05", "0.250", "1.50 (max 3)", "2 kB (1.25x entropy)"):
        assert fact in text


def test_a_pipe_gets_one_line_a_phase_and_not_one_a_tick() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    moments = iter(
        [
            RunProgress(),
            RunProgress(),
            RunProgress(phase="rl", step=1, steps=3),
            RunProgress(phase="rl", step=2),
        ]
    )
    with live_view(lambda: next(moments), name="x", console=console) as tick:
        for _ in range(4):
            tick()
    lines = console.file.getvalue().splitlines()
    assert [text.split("] ")[1] for text in lines] == [
        "starting: compiling, building the tokenizer",
        "asynchronous RL 1/3",
    ]


def test_the_reader_follows_the_file(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path, config())
    assert reader.read().phase == "starting"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(WARM[0]) + "\n")
    assert reader.read().step == 1
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(WARM[1]) + "\n")
    assert reader.read().step == 2


def test_rows_of_an_earlier_invocation_are_what_is_resumed(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path, config(), since=1000.0)
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(WARM[0] | {"time": 900.0}) + "\n")
    assert (reader.read().phase, reader.read().step) == ("resuming", 1)
    with file.open("a") as more:
        more.write(json.dumps(WARM[1] | {"time": 1001.0}) + "\n")
    assert (reader.read().phase, reader.read().step) == ("first_rollouts", 2)


def test_units() -> None:
    assert [clock(5), clock(65), clock(3725)] == ["0:05", "1:05", "1:02:05"]
    assert [kilobytes(999), kilobytes(12_345), kilobytes(3.2e6)] == ["999 B", "12.3 kB", "3.2 MB"]
