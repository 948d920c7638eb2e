"""The slot by its contract: one job in flight, one waiting, the newest wins; no accelerator and no store.

Jobs wait at gates, so every order of events here is forced and none depends on time.
"""

import logging
import threading
from collections.abc import Iterator

import pytest

from rollout_bridge.weights.write.latest_wins import LatestWins, Ticket

TIMEOUT = 300


class Replaced(Exception):
    pass


class Gates:
    """Work that stops at the gate of its job; a job named in `failing` then raises."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open = {name: threading.Event() for name in "abcd"}
        self.failing: set[str] = set()
        self.slot = LatestWins[str, str](
            self._work,
            after=lambda result: self.log.append(f"after {result}"),
            replaced=lambda waiting, newer: Replaced(f"{waiting} by {newer}"),
            name="test",
        )
        self.seen: list[tuple[str | None, str | None]] = []

    def put(self, job: str) -> Ticket[str]:
        def make(ahead: str | None, waiting: str | None) -> str:
            self.seen.append((ahead, waiting))
            return job

        return self.slot.put(make)

    def _work(self, job: str) -> str:
        assert self.open[job].wait(TIMEOUT)
        self.log.append(job)
        if job in self.failing:
            raise ValueError(job)
        return job.upper()


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    for gate in gates.open.values():
        gate.set()


def test_of_the_jobs_that_wait_only_the_newest_runs_and_each_sees_what_is_before_it(gates):
    tickets = [gates.put(job) for job in "abcd"]
    assert gates.seen == [(None, None), ("a", None), ("a", "b"), ("a", "c")]
    for ticket, message in ((tickets[1], "b by c"), (tickets[2], "c by d")):
        with pytest.raises(Replaced, match=message):
            ticket.result(0)
    assert not tickets[0].done() and not tickets[3].done()
    gates.open["d"].set()
    gates.open["a"].set()
    assert [tickets[0].result(TIMEOUT), tickets[3].result(TIMEOUT)] == ["A", "D"]
    gates.slot.close()
    assert gates.log[:3] == ["a", "after A", "d"]


def test_a_failure_fails_the_waiting_job_too_and_the_next_put_reports_it_once(gates):
    gates.failing = {"a"}
    flight, waiting = gates.put("a"), gates.put("b")
    gates.open["a"].set()
    with pytest.raises(ValueError, match="a"):
        waiting.result(TIMEOUT)
    with pytest.raises(ValueError, match="a"):  # nobody has asked for the result of the flight yet
        gates.put("c")
    assert gates.seen == [(None, None), ("a", None)] and flight.done()
    gates.open["c"].set()
    assert gates.put("c").result(TIMEOUT) == "C"
    assert gates.seen[2] == (None, None)
    gates.slot.close()
    assert "b" not in gates.log


def test_an_error_that_result_has_raised_is_not_raised_again(gates):
    gates.failing = {"a"}
    gates.open["a"].set()
    with pytest.raises(ValueError, match="a"):
        gates.put("a").result(TIMEOUT)
    gates.open["b"].set()
    gates.put("b")
    gates.slot.close()
    assert gates.log[:2] == ["a", "b"]


@pytest.mark.parametrize("failing", ["a", "b"])
def test_close_waits_for_both_jobs_and_raises_an_unreported_error(gates, failing):
    gates.failing = {failing}
    gates.put("a")
    gates.put("b")
    with pytest.raises(TimeoutError):
        gates.slot.settle(0.01)
    threading.Timer(0.05, gates.open["a"].set).start()
    gates.open["b"].set()
    with pytest.raises(ValueError, match=failing):
        gates.slot.close()
    assert gates.log == (["a"] if failing == "a" else ["a", "after A", "b"])


def test_an_error_of_what_follows_a_job_is_logged_and_the_waiting_job_runs(gates, caplog):
    """It is no error of the job: each ticket has its result, and nothing is raised later."""

    def after(result: str) -> None:
        gates.log.append(f"after {result}")
        if result == "A":
            raise KeyError("of what follows")

    gates.slot._after = after
    flight, waiting = gates.put("a"), gates.put("b")
    gates.open["b"].set()
    with caplog.at_level(logging.ERROR):
        gates.open["a"].set()
        assert [flight.result(TIMEOUT), waiting.result(TIMEOUT)] == ["A", "B"]
    gates.open["c"].set()
    assert gates.put("c").result(TIMEOUT) == "C"
    gates.slot.close()
    assert gates.log[:3] == ["a", "after A", "b"]
    [record] = caplog.records
    assert record.exc_info is not None and record.exc_info[0] is KeyError
