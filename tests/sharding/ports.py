"""A port of this machine for a coordinator that is about to start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A free port that no other process is given meanwhile; a coordinator may listen on it all the same.

    It is bound, and shared as gRPC's servers share theirs (SO_REUSEPORT), but not listened on: whoever
    connects before the coordinator does is refused.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
