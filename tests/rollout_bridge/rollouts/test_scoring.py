"""Scoring processes: whatever a verifier does costs its own call, and the next call is answered."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_bridge.rollouts.environments.base import Answer, Task, as_score
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec
from rollout_bridge.rollouts.scoring import CallFailed, ScoringError, ScoringPool
from rollout_bridge.trajectories.schema import Status
from tests.running import runs

PATIENCE = 300.0  # seconds for what takes a moment, on a machine that stalls
ROOT = Path(__file__).parents[3]
TASK = Task(index=3, name="copy", messages=({"role": "user", "content": "t3"},), data={"text": "t3"})
MISBEHAVING = "tests.rollout_bridge.rollouts.copying:Misbehaving"


def answer(text: str) -> Answer:
    return Answer(text=text, turns=(text,), ended=True, tokens=len(text))


def pool(*, name=MISBEHAVING, processes=1, timeout=PATIENCE, memory=1 << 28, **options) -> ScoringPool:
    spec = EnvironmentSpec(name=name, options=options, seed=0)
    return ScoringPool(spec, processes=processes, memory_bytes=memory, timeout_seconds=timeout)


def run(work, **settings):
    """`work(pool)` with a pool that is closed afterwards."""

    async def main():
        scoring = pool(**settings)
        try:
            return await work(scoring)
        finally:
            await scoring.close()

    return asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE))


@pytest.mark.parametrize(
    ("text", "status", "detail"),
    [
        ("exit", Status.ENVIRONMENT_FAILURE, "SystemExit: 3"),
        ("die", Status.ENVIRONMENT_FAILURE, "closed its connection; the process ended with status 3"),
        ("allocate", Status.ENVIRONMENT_FAILURE, "MemoryError: more than 256 MiB"),
        ("connect", Status.ENVIRONMENT_FAILURE, "PermissionError: [Errno 13]"),
        ("not a number", Status.ENVIRONMENT_FAILURE, "the reward is nan, expected finite numbers"),
        ("text", Status.ENVIRONMENT_FAILURE, "the reward is 'good', expected finite numbers"),
        ("print", Status.OK, ""),
        ("parts", Status.OK, ""),
    ],
)
def test_what_a_verifier_does_costs_its_own_score(text, status, detail) -> None:
    async def work(scoring):
        return [await scoring.score(TASK, answer(text)), await scoring.score(TASK, answer("good"))]

    score, following = run(work)
    assert score.status is status and detail in score.detail
    assert (following.status, following.total) == (Status.OK, 1.0)
    if text == "parts":
        assert (score.components, score.total) == ({"style": 0.25, "length": 0.5}, 0.75)


CODE = {
    "new file": "open({path!r}, 'w').write('x')",
    "existing file": "open({existing!r}, 'a').write('x')",
    "remove": "__import__('os').remove({existing!r}) or 1",
    "directory": "__import__('os').mkdir({path!r}) or 1",
    "link": "__import__('os').symlink('/', {path!r}) or 1",
    "by another process": "__import__('subprocess').call(['touch', {path!r}]) * 0 + 1",
    "truncate": "__import__('os').truncate({existing!r}, 0) or 1",
}


@pytest.mark.parametrize("kind", CODE)
def test_code_in_an_answer_changes_no_file(kind, tmp_path) -> None:
    path, existing = tmp_path / "canary", tmp_path / "existing"
    existing.write_text("as it was")
    code = CODE[kind].format(path=str(path), existing=str(existing))
    task = replace(TASK, data={"text": "t3", "code": code})

    async def work(scoring):
        return await scoring.score(task, answer("run code"))

    score = run(work)
    assert not path.exists() and existing.read_text() == "as it was"
    if kind != "by another process":
        assert score.status is Status.ENVIRONMENT_FAILURE and "PermissionError" in score.detail


def test_code_in_an_answer_signals_no_process_but_its_own() -> None:
    """Signal 0 asks for the permission and sends nothing: a process of the same user has it by default."""
    codes = (
        f"__import__('os').kill({os.getpid()}, 0) or 1",
        "__import__('os').kill(__import__('os').getpid(), 0) or 1",
        "(child := __import__('subprocess').Popen(['sleep', '60'])).kill() or -child.wait()",
    )

    async def scores(scoring):
        tasks = [replace(TASK, data={"text": "t3", "code": code}) for code in codes]
        return [await scoring.score(task, answer("run code")) for task in tasks]

    worker, itself, child = run(scores)
    assert worker.status is Status.ENVIRONMENT_FAILURE and "PermissionError" in worker.detail
    assert (itself.total, child.total) == (1.0, 9.0)  # 9: SIGKILL


@pytest.mark.parametrize("leaving", ["start_new_session=True", "process_group=0"])
def test_what_an_answer_starts_ends_with_its_process(leaving) -> None:
    """A process outside the group of the scoring process would outlive the kill of that group."""
    started = "__import__('subprocess').Popen(['sleep', '60'], {}).pid"

    async def scores(scoring):
        codes = [started.format(options) for options in ("cwd=None", leaving)]
        tasks = [replace(TASK, data={"text": "t3", "code": code}) for code in codes]
        return [await scoring.score(task, answer("run code")) for task in tasks]

    inside, outside = run(scores)
    assert outside.status is Status.ENVIRONMENT_FAILURE and "PermissionError" in outside.detail
    deadline = time.monotonic() + PATIENCE
    while runs(int(inside.total)):
        assert time.monotonic() < deadline, "it outlived its scoring process"
        time.sleep(0.01)


def test_a_verifier_may_keep_temporary_files_and_sees_no_secrets(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")

    async def work(scoring):
        directories = [process._directory for process in scoring._all]
        assert not directories
        scores = [await scoring.score(TASK, answer(text)) for text in ("keep notes", "read secrets")]
        return [score.total for score in scores], [process._directory for process in scoring._all]

    totals, directories = run(work)
    assert totals == [1.0, 0.0]
    assert directories and not any(os.path.exists(directory) for directory in directories)


@pytest.mark.parametrize("text", ["hang", "hold the GIL"])
def test_a_verifier_that_does_not_end_is_killed_and_replaced(text) -> None:
    async def work(scoring):
        before = await scoring.call("process")
        scoring._timeout = 0.5
        score = await scoring.score(TASK, answer(text))
        scoring._timeout = PATIENCE
        return before, score, await scoring.call("process")

    before, score, after = run(work)
    assert (score.status, score.total, score.detail) == (Status.TIMEOUT, 0.0, "took over 0.5 s")
    assert before != after and not runs(before)


def test_a_call_that_is_cancelled_leaves_no_process_busy_with_it() -> None:
    async def work(scoring):
        before = await scoring.call("process")
        hanging = asyncio.create_task(scoring.score(TASK, answer("hang")))
        await asyncio.sleep(0.05)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        return before, await scoring.score(TASK, answer("good"))

    before, score = run(work)
    assert score.total == 1.0 and not runs(before)


def test_a_process_that_died_idle_costs_nothing() -> None:
    async def work(scoring):
        process = await scoring.call("process")
        os.kill(process, 9)
        while not scoring._idle[0].broken:
            await asyncio.sleep(0.01)
        return await scoring.score(TASK, answer("good"))

    assert run(work).total == 1.0


def test_bytes_that_answer_no_call_replace_the_process(tmp_path) -> None:
    """Else they would be the beginning of the next answer."""
    begin = tmp_path / "begin"

    async def work(scoring):
        before = await scoring.call("process")
        [process] = scoring._all
        done = Path(process._directory) / "done"
        await scoring.call("interject", str(begin), str(done))
        begin.touch()
        while not done.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # the loop reads what is there
        return before, await scoring.score(TASK, answer("parts")), await scoring.call("process")

    before, score, after = run(work)
    assert (score.status, score.components) == (Status.OK, {"style": 0.25, "length": 0.5})
    assert before != after and not runs(before)


def test_an_answer_that_came_in_time_counts_however_late_it_is_seen() -> None:
    """The loop is busy from before the answer until after the limit."""

    async def work(scoring):
        await scoring.start()
        transport = scoring._idle[0]._transport
        scoring._timeout = 0.5
        scoring_it = asyncio.create_task(scoring.score(TASK, answer("good")))
        started = time.monotonic()
        while scoring._idle:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the call is written
        assert select.select([transport.get_extra_info("socket")], [], [], PATIENCE)[0]
        time.sleep(max(0.0, started + 0.6 - time.monotonic()))
        return await scoring_it

    assert run(work).total == 1.0


def test_calls_are_of_any_method_and_their_results_are_bounded() -> None:
    async def work(scoring):
        with pytest.raises(CallFailed, match="has 9437197 bytes, expected at most 8388608"):
            await scoring.call("large")
        with pytest.raises(CallFailed, match="AttributeError: .*no_such"):
            await scoring.call("no_such")
        with pytest.raises(CallFailed, match="arguments of score cannot be pickled"):
            await scoring.call("score", lambda: None)
        return await scoring.call("process")

    assert run(work) != os.getpid()


def test_processes_work_side_by_side() -> None:
    """As many calls run at once as there are processes: one that hangs holds up no other."""

    async def work(scoring):
        await scoring.start()
        hanging = asyncio.create_task(scoring.score(TASK, answer("hang")))
        scores = await asyncio.gather(*(scoring.score(TASK, answer("good")) for _ in range(40)))
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        return scores

    assert {score.total for score in run(work, processes=2)} == {1.0}


def test_an_environment_that_cannot_be_built_is_named_with_the_reason() -> None:
    with pytest.raises(ScoringError, match=r"'no_such:Thing'.*3 times, last: environment.name: .*no_such"):
        run(lambda scoring: scoring.start(), name="no_such:Thing")


def test_processes_end_with_a_parent_that_is_killed() -> None:
    program = """
import asyncio, os, sys
from tests.rollout_bridge.rollouts.test_scoring import pool
async def main():
    scoring = pool()
    print(await scoring.call("process"), flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    parent = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    process, deadline = int(parent.stdout), time.monotonic() + PATIENCE
    while runs(process):
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("value", "total", "components"),
    [(1, 1.0, {"reward": 1.0}), ({"a": 0.5, "b": -1}, -0.5, {"a": 0.5, "b": -1.0}), ({}, 0.0, {})],
)
def test_a_reward_is_a_number_or_components_whose_sum_it_is(value, total, components) -> None:
    score = as_score(value)
    assert (score.total, score.components, score.status) == (total, components, Status.OK)


@pytest.mark.parametrize("value", [None, "1", float("inf"), {"a": "b"}, {"a": float("nan")}, [1]])
def test_what_is_no_reward_is_an_environment_failure(value) -> None:
    assert as_score(value).status is Status.ENVIRONMENT_FAILURE
