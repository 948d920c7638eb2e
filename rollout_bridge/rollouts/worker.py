"""The rollout worker: claims prompts, keeps the engine busy with groups, scores them, writes segments.

A claim is complete only after every index of it is in a durable segment, so a worker may be killed at any
moment: its claims expire, and prompts without a segment are generated again. Evaluation requests go first.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rollout_bridge.control import CREDITS_KEY, REFUSALS_PREFIX, WARM_START, Refusals, read, read_state
from rollout_bridge.engines.protocol import Purpose, RolloutEngine
from rollout_bridge.rollouts.environments.base import Environment
from rollout_bridge.rollouts.episode import Policy, Sampling, play
from rollout_bridge.rollouts.evaluation import Evaluator
from rollout_bridge.rollouts.generation import EngineCaller, derive_seed, wait_ready
from rollout_bridge.rollouts.scoring import ScoringPool
from rollout_bridge.rollouts.settings import WorkerError, WorkerSettings
from rollout_bridge.rollouts.transcript import Origin, Tokenizer
from rollout_bridge.store import Store
from rollout_bridge.threads import finished_in_thread
from rollout_bridge.trajectories.claims import Claim, ClaimBook
from rollout_bridge.trajectories.contract import Contract, compare
from rollout_bridge.trajectories.log import SegmentWriter
from rollout_bridge.trajectories.schema import Trajectory
from rollout_bridge.waiting import Unchanged

logger = logging.getLogger(__name__)

REFUSED_SEGMENTS = 3  # so many, and more than half of all, end the worker


@dataclass
class _Held:
    """A claim being worked on: indices not started, and those started but not yet in a segment."""

    claim: Claim
    todo: deque[int]
    open: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class WorkerReport:
    """Counts of a worker's run."""

    writer: str
    groups: int
    segments: int
    evaluations: int


class RolloutWorker:
    """Runs until the trainer has finished, `stop` is set, or SIGTERM.

    processes: hold a copy of the environment each; started and closed by `run`.
    worker_id: a name for people; its writer id is that and a random suffix, new at each start.
    stop_ids: taken from the tokenizer if the settings name none.
    agent: keeps the engine at a version, for evaluations; "" if that is not known.
    contract: of its trajectories; that of the store's run must be the same.
    clock: monotonic seconds, for leases.
    """

    def __init__(
        self,
        store: Store,
        engine: RolloutEngine,
        environment: Environment,
        tokenizer: Tokenizer,
        processes: ScoringPool,
        settings: WorkerSettings,
        worker_id: str,
        *,
        agent: str = "",
        contract: Contract | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._engine = engine
        self._environment = environment
        self._tokenizer = tokenizer
        self._processes = processes
        self._caller = EngineCaller(
            engine=engine,
            timeout_seconds=settings.generate_timeout_seconds,
            patience_seconds=settings.engine_timeout_seconds,
            poll_seconds=settings.poll_seconds,
        )
        self._settings = settings
        self._agent = agent
        self._unchanged = Unchanged(clock)
        self.writer_id = f"{worker_id}-{uuid.uuid4().hex[:8]}"
        if not settings.stop_ids and tokenizer.eos_token_id is None:
            raise WorkerError(
                "rollouts.stop_ids is empty and the tokenizer has no end-of-sequence token; answers "
                "would never end"
            )
        self._stop_ids = settings.stop_ids or (int(tokenizer.eos_token_id),)
        if contract is not None:
            compare(store, contract, who="worker")
        self._writer = SegmentWriter(store, self.writer_id, contract=contract)
        self._contract = contract
        self._refused = 0  # segments
        self._book = ClaimBook(
            store,
            self.writer_id,
            count=settings.claim_groups,
            lease_seconds=settings.lease_seconds,
            clock=clock,
        )
        self._moves = asyncio.Lock()  # one compare-and-swap of a claim at a time, or one of two would fail
        self._held: dict[int, _Held] = {}
        # task -> (claim start, index)
        self._groups: dict[asyncio.Task[list[Trajectory]], tuple[int, int]] = {}
        self._buffer: list[tuple[int, list[Trajectory]]] = []
        self._buffered_at = 0.0
        self._writing: list[tuple[int, list[Trajectory]]] = []  # at the front of the buffer, maybe in the log
        self._written_groups = self._written_segments = self._evaluations = 0

    async def run(self, stop: asyncio.Event | None = None) -> WorkerReport:
        """Works until `stop` is set or the run is finished; then flushes finished groups, releases its claims
        and reports.

        Raises `WorkerError` after a timeout, and errors of the store; its claims then expire.
        """
        stop = stop if stop is not None else _stop_on_signals()
        settings = self._settings
        evaluator = Evaluator(
            store=self._store,
            caller=self._caller,
            environment=self._environment.held_out,
            tokenizer=self._tokenizer,
            processes=self._processes,
            settings=settings,
            worker=self.writer_id,
            stop_ids=self._stop_ids,
            agent=self._agent,
        )
        evaluation: asyncio.Task[None] | None = None
        keeper = asyncio.create_task(self._keep_leases())
        stopping = asyncio.create_task(stop.wait())
        getting_ready = asyncio.create_task(self._get_ready())
        busy_at = time.monotonic()
        try:
            await asyncio.wait({getting_ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if getting_ready.done():
                getting_ready.result()
            while not stop.is_set() and not await self._finished():
                if evaluation is None and (request := await evaluator.next()) is not None:
                    evaluation = asyncio.create_task(evaluator.run(request))
                if evaluation is None:
                    await self._start_groups()
                waiting = {keeper, stopping, *self._groups, *([evaluation] if evaluation else [])}
                await asyncio.wait(
                    waiting, timeout=settings.poll_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                self._collect()
                if keeper.done():
                    keeper.result()  # it ends only by an exception
                if evaluation is not None and evaluation.done():
                    evaluation.result()
                    evaluation = None
                    self._evaluations += 1
                await self._flush(everything=False)
                if self._groups or evaluation is not None or self._buffer:
                    busy_at = time.monotonic()
                elif time.monotonic() - busy_at > settings.idle_timeout_seconds:
                    raise WorkerError(
                        f"waited {settings.idle_timeout_seconds:g} s for {CREDITS_KEY} in "
                        f"{self._store.url} to allow more prompts, or for an evaluation "
                        "request: is the trainer running on this store?"
                    )
        finally:
            running = [keeper, stopping, getting_ready, *self._groups, *([evaluation] if evaluation else [])]
            self._collect(raise_errors=False)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            try:
                await self._flush(everything=True)
                for held in self._held.values():
                    await asyncio.to_thread(self._book.release, held.claim)
            finally:
                await self._processes.close()
        return WorkerReport(self.writer_id, self._written_groups, self._written_segments, self._evaluations)

    async def _get_ready(self) -> None:
        """Returns when the scoring processes are there and the engine admits requests."""
        await self._processes.start()  # the engine gets ready at the same time
        await wait_ready(
            self._engine,
            timeout=self._settings.engine_timeout_seconds,
            poll=self._settings.poll_seconds,
            patient=self._warming_up,
        )

    async def _warming_up(self) -> bool:
        """Whether the trainer runs and has nothing to publish yet."""
        state = await asyncio.to_thread(read_state, self._store)
        if state is None or state.phase != WARM_START:
            return False
        return self._unchanged.seconds(state.key, state) < self._settings.engine_timeout_seconds

    async def _finished(self) -> bool:
        state = await asyncio.to_thread(read_state, self._store)
        return state is not None and state.finished

    async def _start_groups(self) -> None:
        """Keeps `max_concurrent_groups` in flight, claiming more prompts when those held run out."""
        while len(self._groups) < self._settings.max_concurrent_groups:
            held = next((held for held in self._held.values() if held.todo), None)
            if held is None:
                acquired = await asyncio.to_thread(self._book.acquire)
                if acquired is None:
                    return
                claim, indices = acquired
                held = self._held[claim.start] = _Held(claim, deque(indices))
            index = held.todo.popleft()
            held.open.add(index)
            task = asyncio.create_task(self._group(index, held.claim.attempt))
            self._groups[task] = (held.claim.start, index)

    async def _group(self, index: int, attempt: int) -> list[Trajectory]:
        """A group of episodes of prompt `index`."""
        settings = self._settings
        rows = await play(
            self._environment,
            index % self._environment.size,
            [partial(self._policy, index, attempt, member) for member in range(settings.group_size)],
            settings.limits,
            tries=settings.task_tries,
            created_at=time.time,
        )
        return rows if self._contract is None else list(map(self._contract.with_reward_in_range, rows))

    def _policy(self, index: int, attempt: int, member: int, number: int) -> Policy:
        """The policy for the n-th try of an episode."""
        settings = self._settings

        def seed(turn: int, tries: int) -> int:
            # Attempts of claims, tries of episodes and tries of requests never share a seed: an episode is
            # tried far fewer than 2^6 times, a request far fewer than 2^10.
            return derive_seed(
                settings.run_seed, index, member, (attempt << 16) + (number << 10) + tries, turn
            )

        sampling = Sampling(
            request_id=f"{self.writer_id}-{index}-{member}",
            seed=seed,
            stop_ids=self._stop_ids,
            abort_retries=settings.abort_retries,
        )
        origin = Origin(
            prompt_index=index,
            member=member,
            engine=self._engine.name,
            worker=self.writer_id,
            temperature=settings.temperature,
            purpose=Purpose.TRAIN,
        )
        return Policy(self._caller, self._tokenizer, self._processes, sampling, origin)

    def _collect(self, *, raise_errors: bool = True) -> None:
        """Moves finished groups to the buffer. Errors of groups end the worker."""
        for task in [task for task in self._groups if task.done()]:
            start, index = self._groups.pop(task)
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                if not self._buffer:
                    self._buffered_at = time.monotonic()
                self._buffer.append((start, task.result()))
            elif raise_errors:
                raise error
            else:
                logger.error("prompt %d failed while the worker was ending: %s", index, error)

    async def _flush(self, *, everything: bool) -> None:
        """Writes a segment if one is due, and completes the claims whose last index it holds."""
        while self._buffer:
            overdue = time.monotonic() - self._buffered_at >= self._settings.flush_seconds
            if not (everything or overdue or len(self._buffer) >= self._settings.segment_groups):
                return
            # Removed only once durable: a failed write leaves the groups for the flush at the end. It writes
            # the same groups again, so a write whose answer was lost is recognised.
            batch = self._writing = self._writing or self._buffer[: self._settings.segment_groups]
            await finished_in_thread(partial(self._write, batch))
            for start, group in batch:
                held = self._held.get(start)
                if held is None:
                    continue  # lost to another worker; a plan takes one copy
                held.open.discard(group[0].prompt_index)
                if not held.todo and not held.open:
                    del self._held[start]
                    async with self._moves:
                        await asyncio.to_thread(self._book.complete, held.claim)

    def _write(self, batch: list[tuple[int, list[Trajectory]]]) -> None:
        """Runs in a thread, so that a cancelled caller does not write the groups again at the end."""
        self._writer.append([row for _, group in batch for row in group])
        del self._buffer[: len(batch)]
        self._writing = []
        self._buffered_at = time.monotonic()
        self._written_groups += len(batch)
        self._written_segments += 1

    async def _heed_refusals(self) -> None:
        """Logs that the trainer did not take a segment. Raises `WorkerError` once it takes too few."""
        key = f"{REFUSALS_PREFIX}{self.writer_id}.json"
        record = await asyncio.to_thread(read, self._store, Refusals, key)
        if record is None or record.segments <= self._refused:
            return
        self._refused = record.segments
        logger.error("the trainer did not take %s: %s", record.segment, record.reason)
        if self._refused >= REFUSED_SEGMENTS and 2 * self._refused > self._written_segments:
            raise WorkerError(
                f"the trainer did not take {self._refused} of {self._written_segments} segments of "
                f"{self.writer_id}; of {record.segment} it says: {record.reason}. Start this worker with the "
                "run's config and version of the program"
            )

    async def _keep_leases(self) -> None:
        """Renews every claim at a third of its lease; cancels work on claims that another worker took."""
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 3)
            await self._heed_refusals()
            for start, held in list(self._held.items()):
                async with self._moves:
                    if self._held.get(start) is not held:
                        continue  # completed meanwhile
                    # Completes even if cancelled: a renewal after the release would hold the claim of an
                    # ended worker.
                    renewed = await finished_in_thread(partial(self._book.renew, held.claim))
                if renewed is not None:
                    held.claim = renewed
                elif self._held.get(start) is held:
                    logger.warning("%s: %s lost it to another worker", held.claim.key, self.writer_id)
                    del self._held[start]
                    for task in [task for task, (claim, _) in self._groups.items() if claim == start]:
                        task.cancel()


def _stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, in the main thread only."""
    stop = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop
