"""A slot for work on a background thread: one job in flight, at most one waiting, and the newest one wins.

Invariants: a newer job replaces the waiting one; a job that fails also fails the one that waits for it; the
waiting job starts after the one in flight has succeeded and `after` has run.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Ticket(Generic[_Result]):
    """The outcome of one job. An error counts as reported once `result` has raised it."""

    def __init__(self) -> None:
        self.future: Future[_Result] = Future()
        self._reported = False

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> _Result:
        """What the job returned. Raises the job's error, or TimeoutError after `timeout` seconds."""
        concurrent.futures.wait([self.future], timeout)
        self._reported = self.future.done()
        return self.future.result(0)

    def settle(self, timeout: float | None = None) -> None:
        """Waits for the end. Raises the job's error unless it is reported."""
        if not self._reported:
            self.result(timeout)


@dataclass(frozen=True)
class _Entry(Generic[_Job, _Result]):
    job: _Job
    ticket: Ticket[_Result] = field(default_factory=Ticket)


class LatestWins(Generic[_Job, _Result]):
    """Runs `work(job)` on a thread called `name`, then `after(result)` once the ticket has the result.

    replaced: the error of a waiting job, from it and the newer job. All methods belong to one calling thread.
    """

    def __init__(
        self,
        work: Callable[[_Job], _Result],
        *,
        after: Callable[[_Result], None],
        replaced: Callable[[_Job, _Job], Exception],
        name: str,
    ) -> None:
        self._work = work
        self._after = after
        self._replaced = replaced
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()  # of the three below
        self._flight: _Entry[_Job, _Result] | None = None
        self._waiting: _Entry[_Job, _Result] | None = None
        self._ended: Ticket[_Result] | None = None  # the last job that ran to its end

    def put(self, make: Callable[[_Job | None, _Job | None], _Job]) -> Ticket[_Result]:
        """Starts the job `make(in flight, waiting)`, or keeps it waiting in place of the one that waits.

        Raises the unreported error of the job before; then nothing is made.
        """
        with self._lock:
            self.raise_unreported()
            ahead, before = self._flight, self._waiting
            entry = _Entry[_Job, _Result](make(ahead and ahead.job, before and before.job))
            if ahead:
                self._waiting = entry
            else:
                self._flight = entry
                self._executor.submit(self._run, entry)
        if before:
            before.ticket.future.set_exception(self._replaced(before.job, entry.job))
        return entry.ticket

    def raise_unreported(self) -> None:
        """Raises the error of the last job that ended, unless it is reported."""
        if self._ended is not None:
            self._ended.settle()

    def settle(self, timeout: float | None = None) -> None:
        """Waits for both jobs, `timeout` seconds each. Raises an unreported error, or TimeoutError."""
        with self._lock:
            tickets = [entry.ticket for entry in (self._flight, self._waiting) if entry]
        self.raise_unreported()
        for ticket in tickets:
            ticket.settle(timeout)

    def close(self, timeout: float | None = None) -> None:
        """`settle`, then ends the thread."""
        try:
            self.settle(timeout)
        finally:
            self._executor.shutdown(wait=False)

    def _run(self, entry: _Entry[_Job, _Result]) -> None:
        ticket = entry.ticket
        try:
            result = self._work(entry.job)
        except BaseException as error:
            with self._lock:
                waiting, self._flight, self._waiting, self._ended = self._waiting, None, None, ticket
                ticket.future.set_exception(error)
            if waiting:
                waiting.ticket.future.set_exception(error)
            return
        with self._lock:
            following = self._flight = self._waiting
            self._waiting, self._ended = None, ticket
            ticket.future.set_result(result)
        try:
            self._after(result)
        except Exception:
            logger.exception("what follows a job failed; the next job is not affected")
        finally:
            if following:
                self._executor.submit(self._run, following)
