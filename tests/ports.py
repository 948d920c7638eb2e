"""Ports for servers that a test starts later."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# Below those that the kernel gives to outgoing connections (Linux: 32768 and up), of which tests make
# hundreds a second: a port from there could be somebody's before its server has come to bind it, and a client
# that asks for a server that is away could even be connected to itself.
FIRST, LAST = 20000, 32000
DRAWS = 1000

_random = random.SystemRandom()  # not what tests seed: two processes must not draw the same
_held: list[socket.socket] = []


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens. The same number in UDP, which no server here uses, is
    bound as long as this process lives: it keeps other test processes away.
    """
    reason = None
    for _ in range(DRAWS):
        port = _random.randrange(FIRST, LAST)
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError as error:  # taken: another is drawn
            claim.close()
            reason = error
            continue
        _held.append(claim)
        return port
    raise AssertionError(f"none of {DRAWS} ports of 127.0.0.1 can be bound, last: {reason}")


@contextmanager
def held_port() -> Iterator[int]:
    """A free TCP port that no other process is given meanwhile; a coordinator may listen on it all the same.

    It is bound, and shared as gRPC's servers share theirs (SO_REUSEPORT), but not listened on: whoever
    connects before the coordinator does is refused. A vLLM server would find it taken: `free_port` is for it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def listens(port: int) -> bool:
    """Whether a server still has `port` of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
