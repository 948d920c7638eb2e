"""`/pause` answers when the engine has stopped; what it asks of the engine is what vLLM's own asks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_bridge.vllm_plugin.pauses import answer_when_stopped

pytestmark = pytest.mark.vllm

Pause = Callable[..., Coroutine[Any, Any, None]]


class Client:
    """Stands for an `AsyncLLM`, its renderer and its engine: writes down what is awaited.

    error: what the engine answers with.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.renderer = self.engine_core = self
        self._error = error

    async def clear_mm_cache_async(self) -> None:
        self.calls.append("inputs cleared")

    async def pause_scheduler_async(self, **asked: Any) -> None:
        self.calls.append(asked)
        if self._error is not None:
            raise self._error

    async def sleep(self, seconds: float) -> None:
        self.calls.append(f"waited {seconds}")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> tuple[Pause, Pause]:
    """vLLM's own and ours."""
    monkeypatch.setattr(AsyncLLM, "pause_generation", AsyncLLM.pause_generation)  # put back afterwards
    answer_when_stopped()
    answer_when_stopped()
    return inspect.unwrap(AsyncLLM.pause_generation), AsyncLLM.pause_generation


def calls(monkeypatch: pytest.MonkeyPatch, pause: Pause, **options: Any) -> list[Any]:
    client = Client()
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", client.sleep)
        asyncio.run(pause(client, **options))
    return client.calls


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_it_asks_what_vllm_asks_without_the_wait(
    monkeypatch: pytest.MonkeyPatch, pauses: tuple[Pause, Pause], mode: str, clear_cache: bool
) -> None:
    """vLLM is the oracle. When its own no longer waits, this module has no purpose left."""
    own, ours = (calls(monkeypatch, pause, mode=mode, clear_cache=clear_cache) for pause in pauses)
    assert own[-1] == "waited 0.02"
    assert ours == own[:-1]


def test_the_default_is_vllms(monkeypatch: pytest.MonkeyPatch, pauses: tuple[Pause, Pause]) -> None:
    own, ours = (calls(monkeypatch, pause) for pause in pauses)
    assert ours == own[:-1]


def test_an_engine_that_cannot_stop_is_heard(pauses: tuple[Pause, Pause]) -> None:
    client = Client(ValueError("Invalid pause mode"))
    with pytest.raises(ValueError, match="Invalid pause mode"):
        asyncio.run(pauses[1](client, mode="keep", clear_cache=False))
