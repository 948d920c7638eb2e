"""Ports for servers that a test starts later: of this process alone until it ends.

They lie below those that the kernel gives to outgoing connections (Linux: 32768 and up), of which tests make
hundreds a second: a port from there could be somebody's before its server has come to bind it, and a client
that asks for a server that is away could even be connected to itself.
"""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20000, 32000

_random = random.SystemRandom()  # not what tests seed: two processes must not draw the same
_held: list[socket.socket] = []


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens. The same number in UDP, which no server here uses, is
    bound as long as this process lives: it keeps other test processes away.
    """
    while True:
        port = _random.randrange(FIRST, LAST)
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:  # taken: another is drawn
            claim.close()
            continue
        _held.append(claim)
        return port


def listens(port: int) -> bool:
    """Whether a server still has `port` of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
