"""One write of a segment, plan or claim fails once: who wrote it goes on, and nothing is lost or doubled."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from rollout_bridge.store import Store, StoreError
from rollout_bridge.trajectories import accounting
from rollout_bridge.trajectories.claims import PREFIX as CLAIMS
from rollout_bridge.trajectories.claims import Claim, ClaimBook, grant, granted
from rollout_bridge.trajectories.log import LogReader, SegmentWriter
from rollout_bridge.trajectories.plan import discard_plans_after, plan_steps
from rollout_bridge.trajectories.planner import Planner, PlanTimeoutError
from tests.rollout_bridge.failing import FailsOnce
from tests.rollout_bridge.trajectories.conftest import LENGTH, selection_settings

ARRIVES = pytest.mark.parametrize("arrives", [False, True], ids=["not-written", "written"])
LEASE = 10.0


def each_write(
    scene: Callable[[FailsOnce], None], *, prefix: str = "", arrives: bool
) -> Iterator[tuple[str, FailsOnce]]:
    """(key, store) of every write of `scene` under `prefix`, after a scene in which that write failed."""
    counted = FailsOnce.open(f"memory://{uuid.uuid4().hex}", probe=False)
    counted.arm(None, prefix=prefix)
    scene(counted)
    assert counted.keys
    for number, key in enumerate(counted.keys):
        store = FailsOnce.open(f"memory://{uuid.uuid4().hex}", probe=False)
        store.arm(number, arrives=arrives, prefix=prefix)
        scene(store)
        assert store.keys[number] == key
        yield key, store


def until_done(work: Callable[[], object]) -> int:
    """How many errors `work` raised before it was done; one at most."""
    try:
        work()
    except StoreError as error:
        assert "injected" in str(error)
        work()
        return 1
    return 0


@ARRIVES
def test_a_segment_is_in_the_log_once_however_often_it_is_tried(arrives: bool, make_group) -> None:
    """The groups of a segment whose write failed are appended again, as a worker does."""
    errors = 0

    def scene(store: Store) -> None:
        nonlocal errors
        writer = SegmentWriter(store, "w")
        for index in range(4):
            errors += until_done(lambda index=index: writer.append(make_group(index)))

    for _, store in each_write(scene, arrives=arrives):
        assert [ref.trajectory_id for ref in LogReader(store).poll()] == [
            f"{index:08d}/{member}" for index in range(4) for member in range(2)
        ]
        assert len(store.list("trajectories/")) == 4
    assert errors == 4


@ARRIVES
def test_plans_and_credits_are_those_of_a_trainer_whose_store_never_failed(arrives: bool, make_group) -> None:
    """Four steps of two groups each; a step is asked for again after an error."""
    errors = 0

    def scene(store: Store) -> None:
        nonlocal errors
        settings = selection_settings(4 * LENGTH)
        planner = Planner(store, settings, outstanding_groups=2, sleep=lambda _: None)
        log = SegmentWriter(Store.open(store.url, probe=False), "w")
        for step in range(4):
            log.append([*make_group(2 * step), *make_group(2 * step + 1)])
            errors += until_done(lambda step=step: planner.plan(step, step, timeout=0))
        with pytest.raises(PlanTimeoutError):
            planner.plan(4, 4, timeout=0)

    sound = Store.open(f"memory://{uuid.uuid4().hex}", probe=False)
    scene(sound)
    plans = [sound.read(key) for key in sound.list("plans/")]
    keys = []
    for key, store in each_write(scene, arrives=arrives):
        keys.append(key)
        assert plan_steps(store) == [0, 1, 2, 3] and [store.read(k) for k in store.list("plans/")] == plans
        counts = accounting.count(store)
        assert counts.adds_up and (counts.trained, counts.pending, counts.missing) == (16, 0, 0)
        assert granted(store) == granted(sound) == 8 + 2
    assert errors == len(keys) == 8 and sum(key.startswith("plans/") for key in keys) == 4


@ARRIVES
def test_plans_discarded_by_a_call_that_failed_leave_no_gap(arrives: bool, make_group) -> None:
    """A gap would be an error at the next start; without one the same call, made again, goes on."""
    left: list[list[int]] = []

    def scene(store: Store) -> None:
        log = Store.open(store.url, probe=False)
        SegmentWriter(log, "w").append([row for index in range(4) for row in make_group(index)])
        planner = Planner(log, selection_settings(2 * LENGTH), outstanding_groups=2, sleep=lambda _: None)
        for step in range(4):
            planner.plan(step, step, timeout=0)
        try:
            discard_plans_after(store, 0)
        except StoreError:
            left.append(plan_steps(store))
            discard_plans_after(store, 0)

    for _, store in each_write(scene, arrives=arrives):
        assert plan_steps(store) == [0]
    # Of steps 1 to 3 one is gone after another, from the last.
    assert left == ([[0, 1, 2], [0, 1], [0]] if arrives else [[0, 1, 2, 3], [0, 1, 2], [0, 1]])


@ARRIVES
def test_every_prompt_is_finished_once_whatever_write_of_a_claim_failed(arrives: bool, make_group) -> None:
    """Two workers in turn claim, renew, write and complete; one gives up in the third turn.

    A worker goes on after an error. A claim that it lost sight of is given out again when its lease is over.
    """
    errors = 0

    def scene(store: Store) -> None:
        nonlocal errors
        now = [1000.0]
        log_store = Store.open(store.url, probe=False)
        grant(log_store, 10)
        workers = [
            (
                ClaimBook(store, name, count=2, lease_seconds=LEASE, clock=lambda: now[0]),
                SegmentWriter(log_store, name),
            )
            for name in "ab"
        ]

        def turn(book: ClaimBook, writer: SegmentWriter, *, gives_up: bool) -> bool:
            taken = book.acquire()
            if taken is None:
                return False
            claim = book.renew(taken[0])
            assert claim is not None
            if gives_up:
                return book.release(claim) is not None
            for index in taken[1]:
                writer.append(make_group(index))
            return book.complete(claim) is not None

        for number in range(24):
            try:
                if not turn(*workers[number % 2], gives_up=number == 2):
                    now[0] += LEASE
            except StoreError as error:
                assert "injected" in str(error)
                errors += 1

    keys = []
    for key, store in each_write(scene, prefix=CLAIMS, arrives=arrives):
        keys.append(key)
        claims = [Claim.from_json(key, store.read_json(key)) for key in store.list(CLAIMS)]
        assert all(claim.done for claim in claims)
        assert [(claim.start, claim.end) for claim in claims] == [(i, i + 2) for i in range(0, 10, 2)]
        finished = sorted(ref.trajectory_id for ref in LogReader(store).poll())
        assert finished == [f"{index:08d}/{member}" for index in range(10) for member in range(2)]
    # Of five claims: created, renewed and completed; of one, given up, taken over and renewed besides.
    assert errors == len(keys) == 5 * 3 + 3
