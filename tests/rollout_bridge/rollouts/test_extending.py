"""The environments of docs/extending, by config alone, with a real worker, store and embedded engine."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.commands.environment import environment_of
from jaxtrain.commands.fleet import build_engine, scoring_pool, worker_settings
from jaxtrain.config.load import load_config
from jaxtrain.config.resume import claim_run
from jaxtrain.config.schema import AsyncGrpoConfig
from rollout_bridge.rollouts.environments.base import Answer
from rollout_bridge.rollouts.worker import RolloutWorker
from rollout_bridge.store import Store
from rollout_bridge.trajectories.claims import grant
from rollout_bridge.trajectories.log import read_segment
from rollout_bridge.trajectories.schema import Status
from rollout_bridge.weights.format.run import RunInfo
from tests.jaxtrain.inference.test_engine import HF_CONFIG, PLAN, make_update

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs/extending/examples"
PATIENCE = 300.0

CONFIG = """
recipe: async_grpo
model: {{preset: nano, compute_dtype: float32}}
batch: {{rows: 4, sequence_length: 128}}
warm_start: {{steps: 0, learning_rate: {{peak: 1e-3}}, batch: {{start_tokens: 512, end_tokens: 512}}}}
rl: {{steps: 1, learning_rate: {{peak: 1e-3}}, batch: {{start_tokens: 512, end_tokens: 512}}}}
rollouts: {{max_tokens: 8, slots: 4, group_size: 2, segment_groups: 1, scoring_processes: 1}}
evaluation: {{prompts: 4}}
{environment}
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A config as its page shows it, beside a copy of the example it names."""

    def load(page: str, module: str, *overrides: str) -> tuple[AsyncGrpoConfig, Path]:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setenv("JAXTRAIN_SEARCH_PATH", "")
        monkeypatch.delitem(sys.modules, module, raising=False)
        shutil.copy(EXAMPLES / f"{module}.py", tmp_path)
        text = (ROOT / "docs/extending" / page).read_text()
        [shown] = re.findall(r"```yaml\n(environment:\n.*?)```", text, re.DOTALL)
        path = tmp_path / "run.yaml"
        path.write_text(CONFIG.format(environment=shown))
        config = load_config(path, [f"runs_dir={tmp_path}", *overrides])
        assert isinstance(config, AsyncGrpoConfig)
        return config, path

    return load


def rollouts(config: AsyncGrpoConfig, source: Path, tokenizer, *, groups: int):
    """The environment, and what a worker writes for the first groups.

    Half of the vocabulary ends a turn, so that a policy that knows nothing ends its turns.
    """
    claim_run(config)
    store = Store.open(config.store_url)
    environment = environment_of(config, source=source)
    run = RunInfo.new(HF_CONFIG, PLAN)
    stops = (tokenizer.eos_token_id, *range(0, HF_CONFIG["vocab_size"], 2))
    grant(store, groups)

    def written():
        return [row for key in store.list("trajectories/") for row in read_segment(store, key)]

    async def main() -> None:
        engine, stop = build_engine(config, run), asyncio.Event()
        await engine.update(make_update(source.parent, 1))
        settings = worker_settings(config, stop_ids=stops)
        worker = RolloutWorker(
            store, engine, environment, tokenizer, scoring_pool(config), settings, "worker-0"
        )
        working, deadline = asyncio.create_task(worker.run(stop)), time.monotonic() + PATIENCE
        while len(written()) < groups * config.rollouts.group_size and not working.done():
            assert time.monotonic() < deadline, "the worker did not get there"
            await asyncio.sleep(0.05)
        stop.set()
        await working
        await engine.close()

    asyncio.run(main())
    return environment, sorted(written(), key=lambda row: row.trajectory_id)


def test_an_environment_with_its_own_reward(configured, tokenizer) -> None:
    config, source = configured("environment.md", "sums")
    environment, rows = rollouts(config, source, tokenizer, groups=3)
    assert len(rows) == 6 and {row.status for row in rows} == {Status.OK}
    for row in rows:
        task = environment.task(row.prompt_index)
        text = tokenizer.decode(row.token_ids[row.trainable], skip_special_tokens=True)
        right = float(text.strip() == str(task.data["sum"]))
        assert row.rewards == {"right": right, "length": pytest.approx(-0.02 * row.trainable.sum())}
        assert row.reward == pytest.approx(sum(row.rewards.values()))
    both = [{environment.task(i).messages[0]["content"] for i in range(200)}]
    both += [{environment.held_out.task(i).messages[0]["content"] for i in range(environment.held_out.size)}]
    assert both[0].isdisjoint(both[1])


def test_an_option_that_is_wrong_is_refused_before_jax_starts(configured, capsys) -> None:
    import typer

    config, source = configured("environment.md", "sums", "environment.largest=3", "environment.prize=1")
    with pytest.raises(typer.Exit):
        environment_of(config, source=source)
    assert capsys.readouterr().err == f"{source}: environment.prize: unknown key; did you mean 'price'?\n"
    config, source = configured("environment.md", "sums", "environment.largest=3")
    with pytest.raises(typer.Exit):
        environment_of(config, source=source)
    assert capsys.readouterr().err == (
        f"{source}: environment.largest: 3 leaves too few sums; expected at least 10\n"
    )


def test_a_tool_environment_of_two_turns(configured, tokenizer) -> None:
    config, source = configured("tool_environment.md", "calculator")
    environment, rows = rollouts(config, source, tokenizer, groups=4)
    two = [row for row in rows if len(row.turns) == 4]
    assert two and {row.status for row in rows} == {Status.OK}
    for row in two:
        assert [turn.kind.value for turn in row.turns] == ["prompt", "model", "tool", "model"]
        prompt, first, tool, last = ([*range(turn.start, turn.end)] for turn in row.turns)
        assert row.trainable[first + last].all() and not row.trainable[prompt + tool].any()
        assert (row.versions[first + last] == 1).all() and (row.versions[prompt + tool] == -1).all()
        said = tokenizer.decode(row.token_ids[first], skip_special_tokens=True)
        shown = tokenizer.decode(row.token_ids[tool], skip_special_tokens=False)
        assert shown == f"?{environment.calculate(said)}="
        assert row.rewards["used"] == 0.1
    for row in rows:
        if row not in two:
            assert row.rewards["used"] == 0.0


def test_the_calculator_and_its_reward(configured) -> None:
    config, source = configured("tool_environment.md", "calculator")
    environment = environment_of(config, source=source)
    assert environment.calculate(" 12 * 3") == "36"
    assert environment.calculate("__import__('os')") == "error: write two numbers with +, - or *"
    task = environment.task(0)
    right = str(task.data["answer"])
    answer = Answer(text=right, turns=("1 * 1", right), ended=True, tokens=9)
    assert environment.score(task, answer) == {"right": 1.0, "used": 0.1}
