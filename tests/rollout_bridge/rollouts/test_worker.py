"""A worker in one process: what it writes, how it retries, when it stops; then its laws when it dies."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import signal
import threading
import time
import uuid
from dataclasses import asdict, replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_bridge.control import Refusals, RunState
from rollout_bridge.engines.protocol import EngineError, FinishReason, Health
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec
from rollout_bridge.rollouts.generation import derive_seed
from rollout_bridge.rollouts.scoring import ScoringError, ScoringPool
from rollout_bridge.rollouts.settings import WorkerError, WorkerSettings
from rollout_bridge.rollouts.transcript import Limits
from rollout_bridge.rollouts.worker import RolloutWorker
from rollout_bridge.store import Store, StoreError
from rollout_bridge.trajectories import accounting
from rollout_bridge.trajectories.claims import ClaimBook, grant, read_claims
from rollout_bridge.trajectories.contract import Contract, ContractError, create_or_compare
from rollout_bridge.trajectories.log import LogReader, read_segment
from rollout_bridge.trajectories.planner import Planner, PlanTimeoutError
from rollout_bridge.trajectories.schema import Status, group_id
from tests.rollout_bridge.failing import FailsOnce
from tests.rollout_bridge.rollouts.copying import CopyEnvironment, Endless, Options, Raising, TwoTurns
from tests.rollout_bridge.trajectories.conftest import selection_settings

SETTINGS = WorkerSettings(
    run_seed=5,
    group_size=4,
    limits=Limits(tokens=24, answer_tokens=8, turns=3, seconds=600.0),
    temperature=1.0,
    stop_ids=(),
    task_tries=2,
    max_concurrent_groups=3,
    claim_groups=4,
    lease_seconds=120.0,
    segment_groups=2,
    flush_seconds=0.0,
    generate_timeout_seconds=600.0,
    abort_retries=3,
    engine_timeout_seconds=0.0,
    idle_timeout_seconds=600.0,
    poll_seconds=0.001,
)
PATIENCE = 300.0  # seconds for what takes a moment, on a machine that stalls


def pool(environment, *, timeout=PATIENCE) -> ScoringPool:
    kind = type(environment)
    spec = EnvironmentSpec(
        name=f"{kind.__module__}:{kind.__qualname__}", options=asdict(environment.options), seed=0
    )
    return ScoringPool(spec, processes=1, memory_bytes=1 << 30, timeout_seconds=timeout)


def worker_of(store, engine, environment, tokenizer, options=SETTINGS, *, scoring=None, **keywords):
    scoring = scoring or pool(environment)
    return RolloutWorker(store, engine, environment, tokenizer, scoring, options, "w", **keywords)


def fast() -> float:
    """A monotonic clock by which the lease of an ended worker is over in a moment."""
    return 1e4 * time.monotonic()


def rows(store: Store):
    return [row for key in store.list("trajectories/") for row in read_segment(store, key)]


async def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the worker did not get there"
        await asyncio.sleep(0.002)


def work(store, engine, environment, tokenizer, done, *, options=SETTINGS, end=None, **keywords):
    """Runs a worker until `done()`, then ends it with `end` (the stop event by default)."""

    async def main():
        stop = asyncio.Event()
        worker = worker_of(store, engine, environment, tokenizer, options, **keywords)
        task = asyncio.create_task(worker.run(stop))
        waiter = asyncio.create_task(until(lambda: task.done() or done()))
        await waiter
        (end or stop.set)()
        return await asyncio.wait_for(task, PATIENCE)

    return asyncio.run(main())


def written(store, groups):
    return lambda: len({row.prompt_index for row in rows(store)}) >= groups


def test_a_segment_row_says_everything(store, engine, environment, tokenizer) -> None:
    engine.versions = (3, 4)
    grant(store, 5)
    report = work(store, engine, environment, tokenizer, written(store, 5))
    assert report.groups == 5
    everything = rows(store)
    assert sorted((r.prompt_index, r.member) for r in everything) == [
        (i, m) for i in range(5) for m in range(4)
    ]
    row = next(r for r in everything if (r.prompt_index, r.member) == (2, 1))
    assert tokenizer.decode(row.token_ids[:4]) == "?t2="
    assert row.trainable.tolist() == [False] * 4 + [True] * 3
    assert row.versions.tolist() == [-1] * 4 + [3, 4, 4] and row.behavior_logprobs[4] == np.float32(-0.25)
    assert (row.task, row.engine, row.kv_policy, row.finish_reason) == ("copy", "policy", "keep_kv", "stop")
    assert row.routed_experts.shape == (7, 2, 1) and row.worker == report.writer and row.max_tokens == 8
    assert row.seed == derive_seed(5, 2, 1, 0) and len({r.seed for r in everything}) == 20
    for r in everything:
        assert r.reward == r.rewards["correct"] == (0.5 if r.seed % 2 else 1.0)
    assert {r.created_at for r in everything if r.prompt_index == 2} == {row.created_at}
    claims = [store.read_json(key) for key in store.list("prompts/claims/")]
    assert all(claim["done"] for claim in claims)


def test_prompts_go_round_the_environment(store, engine, tokenizer) -> None:
    grant(store, 3)
    work(store, engine, CopyEnvironment(Options(size=2)), tokenizer, written(store, 3))
    texts = {row.prompt_index: tokenizer.decode(row.token_ids[:4]) for row in rows(store)}
    assert texts == {0: "?t0=", 1: "?t1=", 2: "?t0="}


def test_it_ends_when_the_trainer_has_finished_and_releases_its_claims(
    store, engine, environment, tokenizer
) -> None:
    grant(store, 2)
    options = replace(SETTINGS, segment_groups=9, flush_seconds=600.0)  # nothing is flushed before the end
    asked = lambda: len(engine.asked) >= 8  # noqa: E731
    state = RunState(phase="finished", step=1, rl_step=1, version=1, time=0)
    finish = lambda: store.put_json(state.key, state.to_json())  # noqa: E731
    report = work(store, engine, environment, tokenizer, asked, options=options, end=finish)
    finished = {row.prompt_index for row in rows(store)}
    assert report.segments == (1 if finished else 0)
    another = ClaimBook(store, "x", count=4, lease_seconds=60).acquire()
    assert (another[1] if another else ()) == tuple(sorted({0, 1} - finished)), (
        "at once, without waiting for the lease"
    )


def test_a_claim_is_complete_no_sooner_than_all_of_it_is_written(
    store, make_engine, environment, tokenizer
) -> None:
    """Of two groups both are begun and one is never answered: it is given to the next worker."""

    class Once(make_engine):
        async def generate(self, requests):
            if requests[0].affinity != group_id(0):
                await asyncio.Event().wait()
            return await super().generate(requests)

    grant(store, 2)
    work(store, Once(), environment, tokenizer, written(store, 1))
    taken = ClaimBook(store, "x", count=4, lease_seconds=60).acquire()
    assert taken is not None and taken[1] == (1,)


def test_sigterm_flushes_and_ends(store, engine, environment, tokenizer) -> None:
    grant(store, 1)
    options = replace(SETTINGS, segment_groups=9, flush_seconds=600.0)

    async def main():
        worker = worker_of(store, engine, environment, tokenizer, options)
        task = asyncio.create_task(worker.run())
        await until(lambda: task.done() or worker._buffer)
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(task, PATIENCE)

    report = asyncio.run(main())
    assert (report.groups, report.segments) == (1, 1) and len(rows(store)) == 4


def test_a_broken_and_a_hanging_verifier_cost_only_their_rows(store, engine, tokenizer) -> None:
    """The policy's answer is wrong for odd seeds; this verifier hangs on the wrong answers to t3."""
    wrong = [member for member in range(4) if derive_seed(5, 3, member, 0) % 2]
    assert len(wrong) == 1
    environment = CopyEnvironment(Options(broken=("t1",), hanging=("t3",)))
    grant(store, 4)
    work(
        store, engine, environment, tokenizer, written(store, 4), scoring=pool(environment, timeout=15.0)
    )  # time for a score on a machine that stalls; those that hang take it all
    for row in rows(store):
        hangs = row.prompt_index == 3 and row.member in wrong
        expected = Status.TIMEOUT if hangs else Status.OK
        if row.prompt_index == 1:
            expected = Status.ENVIRONMENT_FAILURE
            assert row.metadata["detail"] == "RuntimeError: the verifier is broken"
        assert (row.status, row.reward > 0) == (expected, expected is Status.OK)
    assert len(rows(store)) == 16


def test_a_task_that_cannot_be_read_is_recorded_as_failed_and_the_stream_goes_on(
    store, engine, tokenizer
) -> None:
    grant(store, 3)
    work(store, engine, CopyEnvironment(Options(unreadable=(1,))), tokenizer, written(store, 3))
    statuses = {row.prompt_index: row.status for row in rows(store)}
    assert statuses == {0: Status.OK, 1: Status.ENVIRONMENT_FAILURE, 2: Status.OK}
    failed = [row for row in rows(store) if row.prompt_index == 1]
    assert [row.member for row in failed] == [0, 1, 2, 3], "a whole group, so that its claim completes"
    assert {row.metadata["detail"] for row in failed} == {"task 1 raises RuntimeError: no such question"}
    assert all(store.read_json(key)["done"] for key in store.list("prompts/claims/"))


def test_a_prompt_without_room_for_an_answer_costs_its_group(store, engine, tokenizer) -> None:
    """The whole episode has 24 tokens: a prompt of 23 leaves one, a prompt of 24 none."""
    options = replace(SETTINGS, group_size=1)
    for suffix, status in (("x" * 19, Status.OK), ("x" * 20, Status.ENVIRONMENT_FAILURE)):
        url = Store.open(f"memory://{uuid.uuid4().hex}", probe=False)
        grant(url, 2)
        environment = CopyEnvironment(Options(suffix=suffix))
        work(url, engine, environment, tokenizer, written(url, 2), options=options)
        long, short = sorted(rows(url), key=lambda row: row.prompt_index)
        assert (long.status, short.status) == (status, Status.OK)
        if status is Status.OK:
            assert (len(long.token_ids), long.finish_reason) == (24, "stop")
        else:
            assert "the prompt has 24 tokens" in long.metadata["detail"]


def test_an_episode_that_raises_is_tried_again_then_recorded(store, engine, tokenizer) -> None:
    grant(store, 3)
    environment = Raising()
    options = replace(SETTINGS, group_size=1, task_tries=3)
    work(store, engine, environment, tokenizer, written(store, 3), options=options)
    by_index = {row.prompt_index: row for row in rows(store)}
    assert environment.tried == {0: 3, 1: 2, 2: 1}
    assert by_index[0].status is Status.ENVIRONMENT_FAILURE
    assert by_index[0].metadata["detail"] == "RuntimeError: the environment is broken"
    assert by_index[1].seed == derive_seed(5, 1, 0, 1 << 10), "another seed than that of the first try"
    assert (by_index[1].status, by_index[2].status) == (Status.OK, Status.OK)


def test_an_episode_that_does_not_end_is_a_timeout_with_what_was_generated(store, engine, tokenizer) -> None:
    grant(store, 1)
    options = replace(SETTINGS, group_size=1, limits=replace(SETTINGS.limits, seconds=2.0), temperature=0.0)
    work(store, engine, Endless(), tokenizer, written(store, 1), options=options)
    [row] = rows(store)
    assert (row.status, row.metadata["detail"]) == (Status.TIMEOUT, "the episode took over 2 s")
    assert tokenizer.decode(row.token_ids, skip_special_tokens=False) == "?t0=t0<eos>"
    assert [request.prompt_ids for request in engine.asked] == [row.token_ids[:4].tolist()], "not tried again"


def test_an_answer_that_never_comes_costs_its_group_while_others_are_answered(
    store, make_engine, tokenizer
) -> None:
    """The engine fails on the prompt of t0 alone: it fails again only after it has answered others."""
    answered, failures = asyncio.Event(), []

    class Choosy(make_engine):
        async def generate(self, requests):
            if tokenizer.decode(requests[0].prompt_ids) == "?t0=":
                if failures:
                    await asyncio.wait_for(answered.wait(), PATIENCE)
                    await asyncio.sleep(0.01)
                failures.append(requests)
                raise EngineError("policy: cannot take this prompt")
            while not failures:
                await asyncio.sleep(0.001)
            found = await super().generate(requests)
            asyncio.get_running_loop().call_soon(answered.set)
            return found

    grant(store, 2)
    options = replace(SETTINGS, group_size=1, engine_timeout_seconds=0.005)
    work(store, Choosy(), CopyEnvironment(), tokenizer, written(store, 2), options=options)
    first, second = sorted(rows(store), key=lambda row: row.prompt_index)
    assert (first.status, second.status) == (Status.ENVIRONMENT_FAILURE, Status.OK)
    assert "answers others: policy: cannot take this prompt" in first.metadata["detail"]


def test_turns_of_the_environment_are_appended_and_not_trained_on(store, engine, tokenizer) -> None:
    """Prompt ?t0=, the policy's t0, the tool's message ?2= (two characters), the policy's copy."""
    engine.versions = (3,)
    grant(store, 1)
    options = replace(SETTINGS, temperature=0.0)
    environment = TwoTurns()
    work(store, engine, environment, tokenizer, written(store, 1), options=options)
    row = rows(store)[0]
    assert tokenizer.decode(row.token_ids, skip_special_tokens=False) == "?t0=t0<eos>?2=2<eos>"
    assert [(t.kind.value, t.start, t.end) for t in row.turns] == [
        ("prompt", 0, 4),
        ("model", 4, 7),
        ("tool", 7, 10),
        ("model", 10, 12),
    ]
    assert row.trainable.tolist() == [False] * 4 + [True] * 3 + [False] * 3 + [True] * 2
    assert row.versions.tolist() == [-1] * 4 + [3] * 3 + [-1] * 3 + [3] * 2
    assert row.behavior_logprobs[row.trainable].tolist() == [-0.25] * 5
    assert (row.reward, row.rewards, row.generate_seconds) == (2.0, {"reward": 2.0}, 1.0)
    assert row.routed_experts.shape == (12, 2, 1)
    second = [request for request in engine.asked if len(request.prompt_ids) == 10]
    assert list(second[0].prompt_ids) == row.token_ids[:10].tolist(), "the whole context, token by token"
    assert len({request.affinity for request in engine.asked}) == 1


def test_an_environment_that_no_process_can_hold_ends_the_worker(store, engine, tokenizer) -> None:
    grant(store, 1)
    environment = CopyEnvironment(Options(unloadable=True))
    with pytest.raises(ScoringError, match="environment.size: cannot be had here"):
        work(store, engine, environment, tokenizer, lambda: False)


def test_a_renewal_under_way_when_the_worker_ends_does_not_outlive_its_release(
    store, make_engine, environment, tokenizer
) -> None:
    class Silent(make_engine):
        async def generate(self, requests):
            await asyncio.Event().wait()

    grant(store, 1)
    renewing, let, renewed = threading.Event(), threading.Event(), threading.Event()

    async def main():
        stop, standing = asyncio.Event(), lambda: 1000.0
        options = replace(SETTINGS, lease_seconds=0.03)
        worker = worker_of(store, Silent(), environment, tokenizer, options, clock=standing)
        renew = worker._book.renew

        def held(claim):
            renewing.set()
            assert let.wait(PATIENCE)
            try:
                return renew(claim)
            finally:
                renewed.set()

        worker._book.renew = held
        task = asyncio.create_task(worker.run(stop))
        assert await asyncio.to_thread(renewing.wait, PATIENCE)
        stop.set()
        await asyncio.sleep(0.1)
        let.set()
        await asyncio.wait_for(task, PATIENCE)
        assert renewed.wait(PATIENCE)
        return ClaimBook(store, "x", count=4, lease_seconds=60, clock=standing).acquire()

    taken = asyncio.run(main())
    assert taken is not None and taken[1] == (0,), "at once, without waiting for the lease"


def test_a_segment_under_way_when_the_worker_is_cancelled_is_not_written_again(
    store, engine, environment, tokenizer
) -> None:
    grant(store, 1)
    writing, let, written_once = threading.Event(), threading.Event(), threading.Event()

    async def main():
        worker = worker_of(store, engine, environment, tokenizer)
        append = worker._writer.append

        def held(rows):
            assert not writing.is_set() or written_once.wait(PATIENCE)  # a second call comes after the first
            writing.set()
            assert let.wait(PATIENCE)
            key = append(rows)
            written_once.set()
            return key

        worker._writer.append = held
        task = asyncio.create_task(worker.run(asyncio.Event()))
        assert await asyncio.to_thread(writing.wait, PATIENCE)
        task.cancel()
        await asyncio.sleep(0.05)
        let.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(rows(store)) == 4


def test_aborted_answers_are_asked_again_with_another_seed(
    store, make_engine, environment, tokenizer
) -> None:
    engine = make_engine(abort=8)  # two tries of four members
    grant(store, 1)
    work(store, engine, environment, tokenizer, written(store, 1))
    assert {row.status for row in rows(store)} == {Status.OK}
    assert [row.seed for row in rows(store)] == [derive_seed(5, 0, member, 2) for member in range(4)]


def test_an_answer_aborted_every_time_is_an_environment_failure(
    store, make_engine, environment, tokenizer
) -> None:
    grant(store, 1)
    options = replace(SETTINGS, abort_retries=2)
    work(store, make_engine(abort=99), environment, tokenizer, written(store, 1), options=options)
    for row in rows(store):
        assert (row.status, row.finish_reason, row.reward) == (
            Status.ENVIRONMENT_FAILURE,
            FinishReason.ABORT,
            0.0,
        )


def test_a_failing_engine_is_retried_then_named(store, make_engine, environment, tokenizer) -> None:
    grant(store, 1)
    patient = replace(SETTINGS, engine_timeout_seconds=60.0)
    work(store, make_engine(fail=6), environment, tokenizer, written(store, 1), options=patient)
    assert len(rows(store)) == 4
    grant(store, 2)
    with pytest.raises(WorkerError, match="engine policy failed for 0 s.*out of order"):
        work(store, make_engine(fail=99), environment, tokenizer, written(store, 2))
    assert ClaimBook(store, "x", count=4, lease_seconds=60).acquire()[1] == (1,), "its claim was given back"


def test_an_engine_that_breaks_the_contract_is_not_believed(
    store, make_engine, environment, tokenizer
) -> None:
    class Liar(make_engine):
        async def generate(self, requests):
            return [replace(c, logprobs=c.logprobs[:-1]) for c in await super().generate(requests)]

    grant(store, 1)
    with pytest.raises(WorkerError, match="log-probs have shape"):
        work(store, Liar(), environment, tokenizer, written(store, 1))
    assert rows(store) == []


def test_waits_end_with_a_name(store, make_engine, environment, tokenizer) -> None:
    class Cold(make_engine):
        async def health(self):
            return Health(ready=False, version=None, reason="no weights yet")

    never = lambda: False  # noqa: E731
    with pytest.raises(WorkerError, match="engine policy to be ready: no weights yet"):
        work(store, Cold(), environment, tokenizer, never)
    with pytest.raises(WorkerError, match=r"control/credits.json in memory://.*is the trainer running"):
        options = replace(SETTINGS, idle_timeout_seconds=0.01)
        work(store, make_engine(), environment, tokenizer, never, options=options)


def ask(store, name="e1", version=7, prompts=(1, 5), seconds=3600.0) -> None:
    request = {"id": name, "version": version, "prompts": list(prompts), "purpose": "eval"}
    store.put_json(f"control/evaluations/{name}.json", {**request, "expires_after": seconds})


def test_evaluations_go_first_and_apart(store, make_engine, environment, tokenizer) -> None:
    engine = make_engine(versions=(7,))
    ask(store)
    grant(store, 1)
    report = work(store, engine, environment, tokenizer, written(store, 1))
    result = store.read_json("evaluations/e1/result.json")
    assert (result["version"], result["prompts"], result["count"], result["failed"]) == (7, [1, 5], 4, 0)
    assert result["reward_mean"] == 1.0 and result["components"] == {"correct": 1.0, "exact": 1.0}
    assert [request.purpose for request in engine.asked] == ["eval"] * 4 + ["train"] * 4
    assert all(r.temperature == 0 and r.exact_version == 7 for r in engine.asked[:4])
    tables = [
        pq.read_table(io.BytesIO(store.read(k)))
        for k in store.list("evaluations/e1/")
        if k.endswith("parquet")
    ]
    assert sorted(i for table in tables for i in table["prompt_index"].to_pylist()) == [1, 2, 3, 4]
    assert {p for table in tables for p in table["purpose"].to_pylist()} == {"eval"}
    assert {tokenizer.decode(t["token_ids"].to_pylist()[0][:2]) for t in tables} == {"?h"}, (
        "held-out questions"
    )
    assert {row.purpose for row in rows(store)} == {"train"} and report.evaluations == 1


def test_an_evaluation_waits_for_its_version_and_leaves_an_older_one_alone(
    store, make_engine, environment, tokenizer
) -> None:
    engine = make_engine(versions=(6,))
    ask(store, "past", version=5)
    ask(store, "soon", version=7, prompts=(0, 2))

    def advance() -> bool:
        if len(engine.asked) >= 6:
            engine.versions = (7,)
        return store.read("evaluations/soon/result.json") is not None

    work(store, engine, environment, tokenizer, advance)
    assert store.read_json("evaluations/soon/result.json")["reward_mean"] == 1.0
    assert store.list("evaluations/past/") == []


def test_unanswerable_evaluations_say_so_or_expire(
    store, make_engine, environment, tokenizer, caplog
) -> None:
    ask(store, "large", version=0, prompts=(0, 7))
    ask(store, "expired", version=0, seconds=0.0)
    store.put_json("control/evaluations/odd.json", {"id": "../odd"})
    grant(store, 1)
    work(store, make_engine(), environment, tokenizer, written(store, 1))
    result = store.read_json("evaluations/large/result.json")
    assert result["reward_mean"] is None and "holds out 6" in result["error"]
    assert store.list("evaluations/expired/") == [] and "control/evaluations/odd.json" in caplog.text


def test_one_worker_answers_an_evaluation(store, make_engine, environment, tokenizer) -> None:
    ask(store, version=0)
    grant(store, 8)
    engines = [make_engine(name=name) for name in "ab"]

    async def main():
        stop = asyncio.Event()
        workers = [worker_of(store, e, environment, tokenizer) for e in engines]
        tasks = [asyncio.create_task(worker.run(stop)) for worker in workers]
        await until(lambda: sum(worker._evaluations for worker in workers) == 1 and written(store, 8)())
        stop.set()
        return await asyncio.gather(*tasks)

    reports = asyncio.run(main())
    assert sorted(report.evaluations for report in reports) == [0, 1]
    assert sum(r.purpose == "eval" for engine in engines for r in engine.asked) == 4
    assert len(rows(store)) == 32, "two workers shared the prompts without a duplicate"


class Killed(BaseException):
    """The process is gone: nothing after this reaches the store."""


class MortalStore(Store):
    """A store whose process dies at its n-th write, before or after the write took effect."""

    def mortal(self, writes: int, *, after: bool) -> MortalStore:
        self.left, self.after = writes, after
        return self

    def _call(self, verb, key, start):
        if self.left < 0:
            raise ProcessLookupError("dead")
        if verb == "write":
            self.left -= 1
            if self.left < 0:
                if self.after:
                    super()._call(verb, key, start)
                raise ProcessLookupError("dead")
        return super()._call(verb, key, start)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lives=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(1, 5)), max_size=4),
    steps=st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_no_trajectory_is_lost_or_trained_twice_when_workers_die(
    make_engine, tokenizer, lives, steps
) -> None:
    """Workers die at random writes, plans are made in between; in the end every group is there once."""
    url = f"memory://{uuid.uuid4().hex}"
    store = Store.open(url, probe=False)
    groups, step = 9, 0
    grant(store, groups)
    selection = selection_settings(6 * 6)  # six of 4 tokens of prompt, 2 of answer and the end
    environment = CopyEnvironment()

    def plan_some(count: int) -> None:
        nonlocal step
        planner = Planner(store, selection, outstanding_groups=1, sleep=lambda _: None)
        for _ in range(count):
            try:
                planner.plan(step, 0, timeout=0)
            except PlanTimeoutError:
                return
            step += 1

    for (writes, after, claim_groups), planned in zip(lives, steps, strict=False):
        mortal = MortalStore.open(url, probe=False).mortal(writes, after=after)
        options = replace(SETTINGS, claim_groups=claim_groups, lease_seconds=1000.0)
        try:
            work(
                mortal, make_engine(), environment, tokenizer, written(store, groups), options=options,
                clock=fast,
            )  # fmt: skip
        except (ProcessLookupError, ExceptionGroup):
            pass
        except Exception as error:
            assert "dead" in str(error), error  # the store wraps what the death raised
        plan_some(planned)
    work(store, make_engine(), environment, tokenizer, written(store, groups), clock=fast)
    plan_some(9)
    counts = accounting.count(store)
    assert counts.adds_up and counts.missing == 0 and counts.twice == 0 and counts.quarantined_segments == 0
    assert counts.groups == groups
    assert step == groups * 4 // 6 and counts.trained == step * 6
    trained = [row for row in counts.dropped if row != "duplicate"]
    assert not trained, "nothing but second copies was dropped"
    assert len({ref.trajectory_id for ref in LogReader(store).poll()}) == groups * 4
    assert counts.written == groups * 4 + counts.dropped.get("duplicate", 0) and counts.pending == 0


@pytest.mark.parametrize("arrives", [False, True], ids=["not-written", "written"])
def test_a_worker_whose_store_failed_once_raises_and_the_next_one_loses_and_doubles_nothing(
    arrives, make_engine, environment, tokenizer
) -> None:
    """At each write of a claim or a segment, in the process that goes on with another worker."""
    groups, failed = 6, set()
    for number in itertools.count():
        store = FailsOnce.open(f"memory://{uuid.uuid4().hex}", probe=False)
        grant(store, groups)
        store.arm(number, arrives=arrives)
        arguments = {"done": written(store, groups), "clock": fast}
        try:
            work(store, make_engine(), environment, tokenizer, **arguments)
        except StoreError as error:
            assert "injected" in str(error)
        else:
            assert len(store.keys) <= number, "no error is swallowed"
            break
        failed.add(store.keys[number].partition("/")[0])
        arguments["done"] = lambda store=store: (
            written(store, groups)() and all(claim.done for claim in read_claims(store))
        )
        work(store, make_engine(), environment, tokenizer, **arguments)
        found = sorted((row.prompt_index, row.member) for row in rows(store))
        assert found == [(index, member) for index in range(groups) for member in range(4)]
    assert failed == {"prompts", "trajectories"}


@pytest.mark.parametrize("arrives", [False, True], ids=["not-written", "written"])
def test_groups_that_finish_while_a_write_fails_go_into_a_segment_of_their_own(
    arrives, store, make_engine, environment, tokenizer
) -> None:
    """The first segment is written at the end; with another group in it, it could be in the log twice."""

    class InOrder(make_engine):
        failing = asyncio.Event()

        async def generate(self, requests):
            if requests[0].affinity != group_id(0):
                await self.failing.wait()
            return await super().generate(requests)

    class Slow(FailsOnce):
        def _write(self, key, data, generation):
            try:
                return super()._write(key, data, generation)
            except StoreError:
                loop.call_soon_threadsafe(engine.failing.set)
                deadline = time.monotonic() + PATIENCE
                while not any(task.done() for task in list(worker._groups)):
                    assert time.monotonic() < deadline, "no other group was finished"
                    time.sleep(0.002)
                raise

    slow, engine = Slow.open(store.url, probe=False), InOrder()
    grant(store, 4)
    slow.arm(0, arrives=arrives, prefix="trajectories/")

    async def main():
        nonlocal loop, worker
        loop = asyncio.get_running_loop()
        worker = worker_of(slow, engine, environment, tokenizer)
        with pytest.raises(StoreError, match="injected"):
            await asyncio.wait_for(worker.run(asyncio.Event()), PATIENCE)

    loop = worker = None
    asyncio.run(main())
    members = sorted((row.prompt_index, row.member) for row in rows(store))
    assert len(members) >= 8 and len(set(members)) == len(members)
    assert members[:4] == [(0, member) for member in range(4)]


def contract_like(**changes) -> Contract:
    usual = {
        "environment": {"name": "copy"},
        "group_size": SETTINGS.group_size,
        "temperature": SETTINGS.temperature,
        "vocabulary": 1000,
        "max_tokens": SETTINGS.limits.tokens,
        "num_experts": 1000,
        "reward_range": (0.0, 1.0),
    }
    return Contract(**(usual | changes))


def test_a_worker_of_another_contract_does_not_start(store, engine, environment, tokenizer) -> None:
    create_or_compare(store, contract_like())
    worker_of(store, engine, environment, tokenizer, contract=contract_like())
    with pytest.raises(ContractError, match="this worker .* group_size 64, the run's is"):
        worker_of(store, engine, environment, tokenizer, contract=contract_like(group_size=64))


def test_a_reward_out_of_range_costs_its_own_row(store, engine, environment, tokenizer) -> None:
    """The answers' rewards are 0.5 and 1."""
    grant(store, 4)
    narrow = contract_like(reward_range=(0.0, 0.75))
    create_or_compare(store, narrow)
    work(store, engine, environment, tokenizer, lambda: len(rows(store)) >= 8, contract=narrow)
    found = rows(store)
    assert {row.reward for row in found if row.status is Status.OK} <= {0.5}
    failed = [row for row in found if row.status is Status.ENVIRONMENT_FAILURE]
    assert failed and all("reward 1 is not in [0, 0.75]" in row.metadata["detail"] for row in failed)


def test_a_worker_whose_segments_are_not_taken_says_why_and_ends(
    store, engine, environment, tokenizer, caplog
) -> None:
    grant(store, 1000)
    options = replace(SETTINGS, lease_seconds=0.03)
    worker = worker_of(store, engine, environment, tokenizer, options)

    async def main() -> None:
        running = asyncio.create_task(worker.run(asyncio.Event()))
        refused = Refusals(writer=worker.writer_id, segments=1, segment="trajectories/x", reason="too hot")
        store.put_json(refused.key, refused.to_json())
        await until(lambda: "did not take trajectories/x: too hot" in caplog.text)
        assert not running.done(), "one bad segment costs only itself"
        refused = refused.model_copy(update={"segments": 10**6})
        store.put_json(refused.key, refused.to_json())
        await asyncio.wait_for(running, PATIENCE)

    with pytest.raises(WorkerError, match="did not take 1000000 of .* too hot"):
        asyncio.run(main())
