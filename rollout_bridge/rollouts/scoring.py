"""Runs an environment's scores and tools, which read a policy's text, in processes that can be killed.

A process runs one call at a time. If it takes too long, ends or gives an invalid answer, only that call
fails: the process and its process group are killed, and another is started. Processes are started anew, never
forked from this one. They have a bounded amount of memory and no secrets of the environment, and end with
this process. Where the kernel allows it, they have no network, change no file outside a temporary directory
of their own, and signal no process but their own and those they start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from rollout_bridge.errors import ExpectedError
from rollout_bridge.rollouts.environments.base import Answer, Score, Task, as_score, failure
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec
from rollout_bridge.rollouts.scoring_process import LENGTH, MAX_ANSWER_BYTES, MAX_DETAIL
from rollout_bridge.trajectories.schema import Status

logger = logging.getLogger(__name__)

START_SECONDS = 300.0  # of a process: imports of a verifier on a busy machine
STARTS = 3  # of a process that may fail one after another
# What a process that reports no means against it can do.
ABILITIES = {"network": "reach the network", "files": "change files", "signals": "signal other processes"}
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)  # in names of variables
# Threads of numerical libraries: each reserves memory, and processes compute side by side already.
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


class ScoringError(ExpectedError, RuntimeError):
    """No process with the environment can be started; the message has the process's own reason."""


class CallFailed(Exception):
    """A call has no result. status: `TIMEOUT` or `ENVIRONMENT_FAILURE`; the message has the reason."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class ScoringPool:
    """Processes with a copy of one environment. Belongs to one event loop; `close` ends them.

    processes: their largest number, started by `start` or by the first calls. memory_bytes: what the calls of
    one may allocate beside the environment. timeout_seconds: of a call, from its start to its answer.
    """

    def __init__(
        self, spec: EnvironmentSpec, *, processes: int, memory_bytes: int, timeout_seconds: float
    ) -> None:
        if processes < 1 or memory_bytes < 1 or timeout_seconds <= 0:
            raise ValueError(
                f"scoring: {processes} processes, {memory_bytes} bytes, {timeout_seconds} s; expected at "
                "least 1, at least 1, and above 0"
            )
        self._spec = spec
        self._memory_bytes = memory_bytes
        self._timeout = timeout_seconds
        self._slots = asyncio.Semaphore(processes)
        self._processes = processes
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def start(self) -> None:
        """Starts every process, so that the first scores do not wait. Raises `ScoringError`."""
        missing = range(self._processes - len(self._all))
        started = await asyncio.gather(*(self._begin() for _ in missing), return_exceptions=True)
        self._idle += [process for process in started if isinstance(process, _Process)]
        for error in started:
            if isinstance(error, BaseException):
                raise error

    async def score(self, task: Task, answer: Answer) -> Score:
        """The result of the environment's `score`; a failure of any kind becomes a status."""
        try:
            value = await self.call("score", task, answer)
        except CallFailed as error:
            logger.warning("%s: scoring task %d: %s", task.name, task.index, error)
            return failure(str(error), error.status)
        return _score(value)

    async def call(self, method: str, *arguments: Any) -> Any:
        """The JSON value of `environment.method(*arguments)`; arguments are pickled.

        Raises `CallFailed`, and `ScoringError` where no process starts.
        """
        try:
            body = pickle.dumps((method, arguments))
        except Exception as error:
            raise CallFailed(
                Status.ENVIRONMENT_FAILURE, f"arguments of {method} cannot be pickled: {error}"
            ) from error
        async with self._slots:
            process = await self._take()
            try:
                reply = await process.ask(body, timeout=self._timeout)
            except BaseException:
                await self._end(process)
                raise
            if reply.get("last"):
                await self._end(process)
            else:
                self._idle.append(process)
        if "error" in reply:
            raise CallFailed(Status.ENVIRONMENT_FAILURE, str(reply["error"])[:MAX_DETAIL])
        return reply.get("value")

    async def close(self) -> None:
        await asyncio.gather(*(self._end(process) for process in list(self._all)))
        self._idle.clear()

    async def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if not process.broken:
                return process
            await self._end(process)  # it ended while it was idle
        return await self._begin()

    async def _begin(self) -> _Process:
        for left in reversed(range(STARTS)):
            process = await _Process.start()
            self._all.add(process)
            try:
                process.send(json.dumps(sys.path).encode())
                reply = await process.ask(
                    pickle.dumps((self._spec, self._memory_bytes)), timeout=START_SECONDS
                )
                if "error" not in reply:
                    for kind, able in ABILITIES.items():
                        if not reply.get(kind):
                            logger.warning("%s: scoring processes can %s", self._spec.name, able)
                    return process
                problem = str(reply["error"])[:MAX_DETAIL]
            except CallFailed as error:
                problem = str(error)
            except BaseException:
                await self._end(process)
                raise
            await self._end(process)
            if not left:
                raise ScoringError(
                    f"environment {self._spec.name!r}: a scoring process did not start, {STARTS} times, "
                    f"last: {problem}. See that the environment's module and its libraries are installed here"
                )
            logger.warning("environment %r: a scoring process did not start: %s", self._spec.name, problem)
        raise AssertionError("unreachable")

    async def _end(self, process: _Process) -> None:
        self._all.discard(process)
        await process.kill()


class _Process(asyncio.Protocol):
    """One scoring process, and the one call that it may be running."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._directory = ""
        self.broken = ""

    @classmethod
    async def start(cls) -> _Process:
        process, (ours, theirs) = cls(), socket.socketpair()
        process._directory = tempfile.mkdtemp(prefix="scoring-")
        variables = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        variables |= {"TMPDIR": process._directory, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            process._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollout_bridge.rollouts.scoring_process",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**variables, **_ONE_THREAD},
            )
        finally:
            theirs.close()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: process, sock=ours)
        return process

    def send(self, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(LENGTH.pack(len(body)) + body)

    async def ask(self, body: bytes, *, timeout: float) -> dict[str, Any]:
        """The answer to `body`. Raises `CallFailed`; the process cannot be used again."""
        self._reply = asyncio.get_running_loop().create_future()
        if self.broken:
            await self._lost()
        self.send(body)
        await asyncio.wait({self._reply}, timeout=timeout)
        if not self._reply.done():
            await asyncio.sleep(0)  # an answer that came in time, while the loop was busy, is read first
        if not self._reply.done():
            raise CallFailed(Status.TIMEOUT, f"took over {timeout:g} s")
        if self.broken:
            await self._lost()
        return self._reply.result()

    async def kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            await self._child.wait()
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _lost(self) -> None:
        """Raises `CallFailed` with how the process ended."""
        assert self._child is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._child.wait()
        status = self._child.returncode
        ended = "" if status is None else f"; the process ended with status {status}"
        raise CallFailed(Status.ENVIRONMENT_FAILURE, f"{self.broken}{ended}")

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.broken:
            return
        if self._reply is None or self._reply.done():
            self._break("an answer to no call")
            return
        self._received += data
        if len(self._received) < LENGTH.size:
            return
        size = LENGTH.unpack_from(self._received)[0]
        if size > MAX_ANSWER_BYTES + (1 << 16):
            self._break(f"an answer of {size} bytes was announced, expected at most {MAX_ANSWER_BYTES}")
        elif len(self._received) >= LENGTH.size + size:
            body, rest = (
                self._received[LENGTH.size : LENGTH.size + size],
                self._received[LENGTH.size + size :],
            )
            self._received = rest
            try:
                reply = json.loads(body)
            except ValueError:
                reply = None
            if isinstance(reply, dict) and not rest:
                self._deliver(reply)
            else:
                self._break("an answer that is no answer")

    def connection_lost(self, exc: Exception | None) -> None:
        self._break("the scoring process closed its connection")

    def _break(self, reason: str) -> None:
        self.broken = self.broken or reason
        self._deliver({})

    def _deliver(self, reply: dict[str, Any]) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)


def _score(value: Any) -> Score:
    """The score in an answer. The process is not trusted: every type is checked."""
    if isinstance(value, Mapping) and set(value) == {"score"}:
        try:
            fields = dict(value["score"])
            fields["status"] = Status(fields["status"])
            fields["detail"] = str(fields["detail"])[:MAX_DETAIL]
            value = Score(**fields)
        except (TypeError, ValueError, KeyError):
            return failure(f"the score is {value!r:.200}, expected the fields of a score")
    return as_score(value)
