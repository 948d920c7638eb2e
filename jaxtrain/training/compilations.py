"""How many programs jax has compiled in this thread; after its first steps a training loop compiles none."""

from __future__ import annotations

import threading
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = threading.local()


def compilations() -> int:
    """Programs compiled so far for the calling thread, single operations outside jit included.

    Other threads are not counted: publishing and checkpointing compile their own programs.
    """
    return getattr(_count, "value", 0)


def _on_event(event: str, duration_secs: float, **_: Any) -> None:
    if event == _EVENT:
        _count.value = compilations() + 1


jax.monitoring.register_event_duration_secs_listener(_on_event)
