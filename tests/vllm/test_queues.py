"""Readers of vLLM's shared memory queues leave the processor to others while they wait."""

from __future__ import annotations

import threading
import time

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from rollout_bridge.vllm_plugin.queues import wait_without_spinning

pytestmark = pytest.mark.vllm


def test_a_waiting_reader_uses_little_of_the_processor_and_gets_what_comes() -> None:
    """As vLLM has it, the wait of half a second costs this thread half a second of a core."""
    wait_without_spinning()
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()

    writer.enqueue("first")  # vLLM's readers spin for a second after a message
    assert reader.dequeue(timeout=10) == "first"
    used = time.thread_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.5)
    assert time.thread_time() - used < 0.25

    later = threading.Timer(0.2, writer.enqueue, ["second"])
    later.start()
    began = time.monotonic()
    assert reader.dequeue(timeout=30) == "second"
    assert time.monotonic() - began < 4.0  # a reader that sleeps until it is notified may miss it: 5 s then
    later.join()
