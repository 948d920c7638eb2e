"""A process that holds a copy of an environment and runs its methods, one call at a time, until it is killed.

Frames go both ways over one socket: four bytes of length, then the body. Calls come pickled. Answers are
JSON, since a policy's text may control the process that makes them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
from typing import Any

from rollout_bridge.lifetime import end_with_parent
from rollout_bridge.rollouts import sandbox
from rollout_bridge.rollouts.environments.base import Environment, EnvironmentConfigError, Score

LENGTH = struct.Struct("!I")
MAX_ANSWER_BYTES = 8 << 20
MAX_DETAIL = 500


def main(descriptor: int, parent: int) -> None:
    """Answers calls on the socket `descriptor` until it is closed.

    The first frames are the module path as JSON, then (environment spec, bytes of memory for calls) pickled.
    The first answer is {"network": what closes it, "files": the same, "signals": the same}, or {"error": why
    there is no environment}. The others are {"value": the result} or {"error": what was raised, "last":
    whether the process must be replaced}.
    """
    end_with_parent(parent, by=signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output that a verifier prints is dropped
    channel = socket.socket(fileno=descriptor)
    path, setup = receive(channel), receive(channel)
    if path is None or setup is None:
        return
    sys.path[:] = json.loads(path)  # before unpickling modules on it
    try:
        spec, memory_bytes = pickle.loads(setup)
        environment = spec.create()
        network, files = sandbox.close_network(), sandbox.close_files(tempfile.gettempdir())
        signals = sandbox.close_signals()
        sandbox.limit_memory(memory_bytes)
    except Exception as error:
        shown = str(error) if isinstance(error, EnvironmentConfigError) else repr(error)
        send(channel, json.dumps({"error": shown}).encode())
        return
    send(channel, json.dumps({"network": network, "files": files, "signals": signals}).encode())
    while (frame := receive(channel)) is not None:
        try:
            answer = json.dumps({"value": _plain(_call(environment, frame))}).encode()
            if len(answer) > MAX_ANSWER_BYTES:
                answer = _error(f"the result has {len(answer)} bytes, expected at most {MAX_ANSWER_BYTES}")
        except MemoryError:  # the memory may still be held, so a new process takes over
            answer = _error(f"MemoryError: more than {memory_bytes >> 20} MiB", last=True)
        except BaseException as error:  # also sys.exit: only this call has failed
            answer = _error(f"{type(error).__name__}: {error}")
        send(channel, answer)


def send(channel: socket.socket, body: bytes) -> None:
    channel.sendall(LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket) -> bytes | None:
    """The body of the next frame, None once the other side has closed."""
    head = _exactly(channel, LENGTH.size)
    return None if head is None else _exactly(channel, LENGTH.unpack(head)[0])


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        data = channel.recv(min(size - len(found), 1 << 20))
        if not data:
            return None
        found += data
    return bytes(found)


def _call(environment: Environment, frame: bytes) -> Any:
    method, arguments = pickle.loads(frame)
    return getattr(environment, method)(*arguments)


def _plain(value: Any) -> Any:
    """A JSON value; a score as {"score": its fields}."""
    if isinstance(value, Score):
        return {"score": dataclasses.asdict(value)}
    return value.item() if hasattr(value, "item") else value  # of NumPy's numbers


def _error(message: str, *, last: bool = False) -> bytes:
    return json.dumps({"error": message[:MAX_DETAIL], "last": last}).encode()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
