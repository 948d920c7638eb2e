"""A request inside the embedded engine: what it has generated, under which versions, and its future."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_bridge.engines.protocol import Completion, Request, VersionSpan


@dataclass
class Running:
    """A request that is waiting or in a slot. Lists of generated tokens grow with each decode."""

    request: Request
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    started: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    prompt_experts: np.ndarray | None = None
    spans: list[VersionSpan] = field(default_factory=list)

    def extend(self, version: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        if end == start:
            return
        self.tokens.extend(tokens.tolist())
        self.logprobs.extend(logprobs.tolist())
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, end)
        else:
            self.spans.append(VersionSpan(version, start, end))


def routed_experts(entry: Running) -> np.ndarray:
    """int16 [prompt + T, Lm, k]; the last token was never an input, so its row is -1."""
    known = [] if entry.prompt_experts is None else [entry.prompt_experts]
    rows = (
        np.concatenate([*known, *entry.experts]) if known or entry.experts else np.zeros((0, 0, 0), np.int32)
    )
    total = len(entry.request.prompt_ids) + len(entry.tokens)
    out = np.full((total, *rows.shape[1:]), -1, np.int16)
    out[: len(rows)] = rows
    return out


def resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any) -> None:
    """Gives `future` its result, from any thread."""
    _schedule(loop, lambda: future.done() or future.set_result(value))


def reject(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], error: Exception) -> None:
    """Gives `future` its exception, from any thread."""
    _schedule(loop, lambda: future.done() or future.set_exception(error))


def _schedule(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits the future
        loop.call_soon_threadsafe(call)
