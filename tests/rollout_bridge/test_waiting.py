"""Waiting ends with what was looked for, or in time with a message that names it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rollout_bridge.waiting import Interrupted, Unchanged, looks, sleep_unless, wait_for, wait_for_async


class Clock:
    """Time that passes only in `sleep`. `slept`: the pauses so far."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def answers(*values: object) -> Iterator[object]:
    return iter(values)


def test_the_first_answer_that_is_not_none_is_returned_falsy_ones_too(clock: Clock) -> None:
    found = answers(None, None, 0, 1)
    value = wait_for(
        lambda: next(found), "it", timeout=9, poll=2, error=OSError, clock=clock, sleep=clock.sleep
    )
    assert value == 0
    assert clock.slept == [2, 2]


def test_after_the_timeout_the_error_says_how_long_and_what(clock: Clock) -> None:
    seen: list[float] = []
    with pytest.raises(OSError, match=r"^waited 5 s for 4 files in here: look at the writer$"):
        wait_for(
            lambda: seen.append(clock()),
            lambda: f"{len(seen)} files in here: look at the writer",
            timeout=5,
            poll=2,
            error=OSError,
            clock=clock,
            sleep=clock.sleep,
        )
    assert seen == [100, 102, 104, 105]  # the last look is at the timeout


def test_without_time_there_is_one_look(clock: Clock) -> None:
    assert list(looks(0, 1, clock=clock)) == [0]


def test_pauses_double_up_to_the_slowest(clock: Clock) -> None:
    for pause in looks(20, 1, slowest=5, clock=clock):
        clock.sleep(pause)
    assert clock.slept == [1, 2, 4, 5, 5, 3, 0]


def test_a_look_that_raises_ends_the_wait(clock: Clock) -> None:
    def look() -> None:
        if clock() > 103:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for(look, "it", timeout=60, poll=2, error=OSError, clock=clock, sleep=clock.sleep)
    assert clock.slept == [2, 2]


def test_a_coroutine_waits_in_the_same_way() -> None:
    async def run() -> object:
        found = answers(None, None, "here")

        async def look() -> object:
            return next(found)

        async def nothing() -> None:
            return None

        value = await wait_for_async(look, "it", timeout=60, poll=0, error=OSError)
        with pytest.raises(OSError, match="^waited 0 s for it$"):
            await wait_for_async(nothing, "it", timeout=0, poll=0, error=OSError)
        return value

    assert asyncio.run(run()) == "here"


def test_a_record_is_as_old_as_its_last_change_was_seen_to_be() -> None:
    """By hand: seen at 0, still there at 5 and 9, changed by 12, and back to what it was by 14."""
    clock = Clock()
    unchanged = Unchanged(clock)
    found = []
    for pause, record in ((0, "a"), (5, "a"), (4, "a"), (3, "b"), (1, "b"), (1, "a"), (2, "a")):
        clock.now += pause
        found.append(unchanged.seconds("key", record))
    assert found == [0, 5, 9, 0, 1, 0, 2]
    assert unchanged.seconds("other", "a") == 0


def test_a_sleep_ends_when_it_is_interrupted() -> None:
    looked = []

    def interrupted() -> bool:
        looked.append(True)
        return len(looked) == 3

    with pytest.raises(Interrupted):
        sleep_unless(interrupted)(300.0)
    assert len(looked) == 3
    sleep_unless(lambda: False)(0.0)
