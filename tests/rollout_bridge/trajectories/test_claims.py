"""No index is skipped, none is held twice at a time, and only what is unfinished is given out again."""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.store import Store
from rollout_bridge.trajectories.claims import Claim, ClaimBook, ClaimError, grant, granted, read_claims
from rollout_bridge.trajectories.log import SegmentWriter

LEASE = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def book(store: Store, worker: str, clock: Clock, count: int = 4) -> ClaimBook:
    return ClaimBook(store, worker, count=count, lease_seconds=LEASE, clock=clock)


def test_credits_bound_the_stream_and_are_never_taken_back(store) -> None:
    clock = Clock()
    a = book(store, "a", clock)
    assert granted(store) == 0 and a.acquire() is None
    assert grant(store, 6) == 6 and grant(store, 3) == 6
    assert [a.acquire()[1], a.acquire()[1], a.acquire()] == [(0, 1, 2, 3), (4, 5), None]
    grant(store, 7)
    assert a.acquire()[1] == (6,)


def test_an_expired_claim_passes_on_what_no_segment_finished(store, make_group) -> None:
    clock = Clock()
    grant(store, 4)
    a, b, c = (book(store, name, clock) for name in "abc")
    claim, _ = a.acquire()
    SegmentWriter(store, "a").append([*make_group(1), *make_group(2)])
    assert b.acquire() is None and c.acquire() is None
    clock.now += LEASE
    taken, left = b.acquire()
    assert left == (0, 3) and (taken.attempt, taken.holders) == (1, ("a", "b"))
    assert a.renew(claim) is None and a.complete(claim) is None and a.release(claim) is None
    SegmentWriter(store, "b").append(make_group(3))
    b.release(taken)
    assert c.acquire()[1] == (0,)


def test_a_claim_that_its_worker_lost_and_took_again_is_moved_by_the_second_attempt_only(store) -> None:
    """The worker was away for longer than its lease; what it began before must not complete the claim."""
    clock = Clock()
    grant(store, 4)
    a, b = book(store, "a", clock), book(store, "b", clock)
    before, _ = a.acquire()
    assert b.acquire() is None
    clock.now += LEASE
    b.release(b.acquire()[0])
    again, left = a.acquire()
    assert left == (0, 1, 2, 3) and (again.worker, again.attempt, again.holders) == ("a", 2, ("a", "b"))
    assert a.renew(before) is None and a.complete(before) is None and a.release(before) is None
    assert a.complete(again).done


def test_renewal_keeps_a_claim_and_completion_ends_it(store) -> None:
    clock = Clock()
    grant(store, 4)
    a, b = book(store, "a", clock), book(store, "b", clock)
    claim, _ = a.acquire()
    assert b.acquire() is None
    clock.now += LEASE - 1
    claim = a.renew(claim)
    assert b.acquire() is None
    clock.now += LEASE - 1
    assert b.acquire() is None
    assert a.complete(claim).done
    clock.now += LEASE * 9
    assert b.acquire() is None


def test_everything_finished_but_never_completed_is_completed_by_the_next(store, make_group) -> None:
    clock = Clock()
    grant(store, 2)
    book(store, "a", clock, count=2).acquire()
    SegmentWriter(store, "a").append([*make_group(0), *make_group(1)])
    b = book(store, "b", clock)
    assert b.acquire() is None
    clock.now += LEASE
    assert b.acquire() is None
    assert Claim.from_json(
        "prompts/claims/00000000.json", store.read_json("prompts/claims/00000000.json")
    ).done


def test_a_worker_never_takes_its_own_claim_again_however_late_it_renews_it(store) -> None:
    """It would write a group of the claim twice. Another worker takes the claim after a lease."""
    clock = Clock()
    grant(store, 4)
    a, b = book(store, "a", clock), book(store, "b", clock)
    claim, _ = a.acquire()
    assert b.acquire() is None
    clock.now += 9 * LEASE
    assert a.acquire() is None
    taken, _ = b.acquire()
    assert a.renew(claim) is None and b.renew(taken) is not None
    clock.now += LEASE
    assert a.acquire() is None, "it has seen the renewal only now"
    clock.now += LEASE
    assert a.acquire()[1] == (0, 1, 2, 3), "lost once, it is taken as any other"


STEPPED = """
import time
real, step = time.time, 0.0
time.time = lambda: real() + step
from rollout_bridge.store import Store
from rollout_bridge.trajectories.claims import ClaimBook, grant
store = Store.open("memory://clocks", probe=False)
grant(store, 4)
a, b = (ClaimBook(store, name, count=4, lease_seconds=60.0) for name in "ab")
claim, _ = a.acquire()
assert b.acquire() is None
for step in (61.0, 3600.0, -3600.0):
    assert a.acquire() is None, f"a clock step of {step} s: a worker takes its own claim"
    assert b.acquire() is None, f"a clock step of {step} s: another worker takes it"
    claim = a.renew(claim)
    assert claim is not None
"""


def test_a_step_of_the_wall_clock_moves_no_claim() -> None:
    """In a process of its own, whose `time.time` steps from before the first import on."""
    done = subprocess.run([sys.executable, "-c", STEPPED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_damaged_claims_are_named(store) -> None:
    store.put_json("prompts/claims/00000000.json", {"start": 4, "count": 1})
    with pytest.raises(ClaimError, match="prompts/claims/00000000.json"):
        book(store, "a", Clock()).acquire()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_index_is_ever_live_twice_or_skipped(data) -> None:
    store = Store.open(f"memory://{uuid.uuid4().hex}", probe=False)
    clock = Clock()
    counts = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    books = [book(store, f"w{i}", clock, count=count) for i, count in enumerate(counts)]
    live: list[tuple[int, Claim]] = []
    credits = 0
    for _ in range(data.draw(st.integers(5, 25))):
        action = data.draw(
            st.sampled_from(["acquire", "acquire", "grant", "expire", "renew", "complete", "release"])
        )
        if action == "grant":
            credits = grant(store, credits + data.draw(st.integers(0, 7)))
        elif action == "expire":
            clock.now += data.draw(st.sampled_from([LEASE / 2, LEASE]))
        elif action == "acquire":
            worker = data.draw(st.integers(0, len(books) - 1))
            acquired = books[worker].acquire()
            if acquired is not None:
                claim, indices = acquired
                assert set(indices) <= set(range(claim.start, claim.end)) <= set(range(credits))
                # Whoever held it before and was not renewed has lost it.
                live = [(w, c) for w, c in live if c.start != claim.start]
                live.append((worker, claim))
        elif live:
            worker, claim = live.pop(data.draw(st.integers(0, len(live) - 1)))
            moved = getattr(books[worker], action)(claim)
            assert moved is not None, "nobody else took it, so its holder may move it"
            if action == "renew":
                live.append((worker, moved))
        ranges = sorted((c.start, c.end) for _, c in live)
        assert all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:], strict=False)), "disjoint"
    keys = store.list("prompts/claims/")
    chain = [Claim.from_json(key, store.read_json(key)) for key in keys]
    edges = [(c.start, c.end) for c in chain]
    assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False)), "no gap, no overlap"
    assert not edges or (edges[0][0] == 0 and edges[-1][1] <= credits)


def test_interleaved_acquires_of_two_workers_share_nothing(store, monkeypatch) -> None:
    """Both see the same last claim; the conditional create decides, and the loser moves on."""
    clock = Clock()
    grant(store, 6)
    a, b = book(store, "a", clock, count=2), book(store, "b", clock, count=3)
    create = store.create_json
    won: list[tuple[int, ...]] = []

    def create_after_b(key, value):
        if not won:
            monkeypatch.setattr(store, "create_json", create)
            won.append(b.acquire()[1])
        return create(key, value)

    monkeypatch.setattr(store, "create_json", create_after_b)
    assert a.acquire()[1] == (3, 4) and won == [(0, 1, 2)]


def test_other_objects_among_the_claims_are_no_claims(store) -> None:
    """One sorts after every claim, where the next range is looked up."""
    clock = Clock()
    grant(store, 8)
    for name in ("readme.json", "README", "0.json", "00000004.json.bak"):
        store.put(f"prompts/claims/{name}", b"not a claim")
    assert [book(store, "a", clock).acquire()[1], book(store, "b", clock).acquire()[1]] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
    assert [claim.start for claim in read_claims(store)] == [0, 4]
