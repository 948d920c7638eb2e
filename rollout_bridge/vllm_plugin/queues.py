"""How vLLM's processes wait for each other on hosts that compute on their CPU cores.

vLLM 0.32's readers of its shared memory queues call `sched_yield` in a loop for a second after each message,
so an engine core that waits for its worker occupies a whole core while the worker computes. Where the cores
compute the model, that core is lost to the worker's threads and to other processes of the host (sync agent,
rollout workers): on two cores an agent's copy of 0.1 s took 3 to 10 s while requests ran.
"""

from __future__ import annotations

import time
from typing import Any

SLEEP_SECONDS = 1e-4
"""Between two looks at a queue: small beside a step of any model on CPU cores (5 ms and more)."""


def wait_without_spinning() -> None:
    """Let readers and writers of this process sleep between two looks at a queue; on CPU platforms only.

    vLLM's idle mode, which waits for a notification, is no help: it may miss one, and then looks again after
    five seconds. Calling it again in the same process changes nothing.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        queues: Any = shm_broadcast
        queues.sched_yield = _sleep


def _sleep() -> None:
    time.sleep(SLEEP_SECONDS)
