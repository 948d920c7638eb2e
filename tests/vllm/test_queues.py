"""Readers of vLLM's shared memory queues leave the processor to others while they wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from rollout_bridge.vllm_plugin.queues import wait_without_spinning

pytestmark = pytest.mark.vllm


class NoPoller:
    """In the place of what a reader waits for notifications with."""

    def poll(self, timeout: float | None) -> Any:
        pytest.fail(f"the reader waits up to {timeout} ms to be notified, and may miss it")


def test_a_waiting_reader_uses_little_of_the_processor_and_gets_what_comes() -> None:
    """As vLLM has it, a wait of half a second costs this thread half a second of a core."""
    wait_without_spinning()
    writer = MessageQueue(1, 1)
    reader: Any = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()

    waiting = reader._spin_condition
    assert waiting.busy_loop_s == 1  # vLLM's readers spin so long after a message, here as long as it takes
    waiting.busy_loop_s, waiting.poller = 3600.0, NoPoller()
    writer.enqueue("first")
    assert reader.dequeue(timeout=60) == "first"
    began, used = time.monotonic(), time.thread_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.5)
    assert time.thread_time() - used < 0.5 * (time.monotonic() - began)

    later = threading.Timer(0.2, writer.enqueue, ["second"])
    later.start()
    assert reader.dequeue(timeout=60) == "second"
    later.join()
