"""The embedded rollout engine: contract 3 on JAX, for one machine and for synchronous colocated runs.

One thread owns the device. It admits requests into slots, decodes a few tokens, returns finished requests,
and swaps in weights that another thread has loaded. Requests run across swaps; every token is marked with the
version it was sampled from.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.inference import slots as device
from jaxtrain.inference import weights
from jaxtrain.inference.requests import Running, reject, resolve, routed_experts
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from rollout_bridge.engines.protocol import (
    Completion,
    EngineError,
    FinishReason,
    Health,
    KvPolicy,
    Request,
    UpdateReport,
)
from rollout_bridge.quantization.plan import QuantizationPlan
from rollout_bridge.weights.read.update import Update

log = logging.getLogger(__name__)

STOP_WIDTH = 4  # stop ids of a request; more compile a wider program


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """slots: requests decoded together. prompts: distinct prompts admitted at once.

    max_prompt, max_length: tokens.
    decode_tokens: tokens decoded between two checks of the queue and of new weights.
    capture_routed_experts: return the experts of every token, for router replay.
    """

    slots: int
    max_prompt: int
    max_length: int
    prompts: int = 8
    decode_tokens: int = 4
    kv_policy: KvPolicy = KvPolicy.KEEP
    capture_routed_experts: bool = False


@dataclass
class _Swap:
    update: Update
    params: weights.Params
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[float]


class EmbeddedEngine:
    """`RolloutEngine` on the devices of this process.

    Raises `EngineError` from `generate` for a request that cannot fit, naming the setting, and for every
    request in flight if the device thread fails; the engine then reports itself unhealthy.
    """

    name = "embedded"

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        plan: QuantizationPlan,
        settings: EngineSettings,
        *,
        compute_dtype: str = "bfloat16",
        expert_implementation: str = "auto",
    ) -> None:
        config = ModelConfig.from_hf(
            hf_config, compute_dtype=compute_dtype, expert_implementation=expert_implementation, remat="none"
        )
        self.settings = settings
        self._hf_config, self._plan, self._compute_dtype = hf_config, plan, compute_dtype
        self._definition = define(config)
        self._static = device.static(self._definition)
        self._slots = device.empty_slots(self._definition, slots=settings.slots, length=settings.max_length)
        self._running: list[Running | None] = [None] * settings.slots
        self._waiting: deque[Running] = deque()
        self._swap: _Swap | None = None
        self._params: weights.Params | None = None
        self._version: int | None = None
        self._failure: str | None = None
        self._generated = 0
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        loop = asyncio.get_running_loop()
        for request in requests:
            self._check(request)
        entries = [Running(request, loop, loop.create_future()) for request in requests]
        with self._wake:
            self._raise_if_failed()
            self._waiting.extend(entries)
            self._wake.notify()
        try:
            return list(await asyncio.gather(*(entry.future for entry in entries)))
        except BaseException:
            # Requests of a cancelled caller must not keep slots busy.
            for entry in entries:
                entry.future.cancel()
            raise

    async def update(self, update: Update) -> UpdateReport:
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        with self._wake:
            self._raise_if_failed()
            old = self._params
        params = await asyncio.to_thread(self._load, update, old)
        swap = _Swap(update, params, loop, loop.create_future())
        with self._wake:
            self._raise_if_failed()
            self._swap = swap
            self._wake.notify()
        pause = await swap.done
        return UpdateReport(
            version=update.version,
            pause_ms=1e3 * pause,
            total_ms=1e3 * (time.perf_counter() - started),
            tensors=len(update.changed),
        )

    async def version(self) -> int | None:
        return self._version

    async def health(self) -> Health:
        with self._wake:
            busy = sum(entry is not None for entry in self._running)
            metrics: dict[str, float] = {
                "running": busy,
                "waiting": len(self._waiting),
                "generated_tokens": self._generated,
            }
            if self._failure is not None or self._closed:
                reason = self._failure or "the engine is closed"
                return Health(ready=False, version=self._version, reason=reason, metrics=metrics)
            reason = "" if self._version is not None else "no weights yet: waiting for the first update"
            return Health(ready=not reason, version=self._version, reason=reason, metrics=metrics)

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 30.0)

    def _check(self, request: Request) -> None:
        size, settings = len(request.prompt_ids), self.settings
        if not 1 <= size <= settings.max_prompt:
            raise EngineError(
                f"embedded engine: request {request.request_id}: prompt of {size} tokens is not in "
                f"[1, {settings.max_prompt}]; raise batch.sequence_length or shorten the prompt"
            )
        if size + request.max_tokens > settings.max_length:
            raise EngineError(
                f"embedded engine: request {request.request_id}: prompt of {size} tokens and max_tokens "
                f"{request.max_tokens} exceed {settings.max_length}; lower rollouts.max_tokens"
            )

    def _load(self, update: Update, old: weights.Params | None) -> weights.Params:
        params = weights.load(
            update, hf_config=self._hf_config, plan=self._plan, compute_dtype=self._compute_dtype, old=old
        )
        return jax.block_until_ready(params)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._closed:
            raise EngineError("embedded engine: closed; start a new one")

    # The device thread.

    def _run(self) -> None:
        try:
            self._compile()
            while self._wait_for_work():
                self._apply_swap()
                self._admit()
                if any(entry is not None for entry in self._running):
                    self._decode()
        except Exception as error:
            log.exception("embedded engine: the device thread failed")
            self._fail(f"embedded engine: {type(error).__name__}: {error}; restart the worker")
        else:
            self._fail("embedded engine: closed while requests were running")

    def _compile(self) -> None:
        """Compiles everything on zeros before the first weights arrive, so that no request waits for it."""
        settings = self.settings
        floats = {
            path: np.float32 if path in self._definition.buffers else self._compute_dtype
            for path in self._definition.shapes
        }
        zeros = {path: jnp.zeros(s.shape, floats[path]) for path, s in self._definition.shapes.items()}
        prompts = jnp.zeros((settings.prompts, settings.max_prompt), jnp.int32)
        cache, _ = device.prefill(self._static, zeros, prompts)
        ints = np.zeros(settings.slots, np.int32)
        nowhere = device.Insertion(
            slot=np.full(settings.slots, settings.slots, np.int32),
            source=ints,
            token=ints,
            position=ints,
            limit=ints,
            temperature=np.zeros(settings.slots, np.float32),
            seed=np.zeros(settings.slots, np.uint32),
        )
        self._slots = device.insert(self._slots, cache, nowhere)
        stop_ids = jnp.full((settings.slots, STOP_WIDTH), -1, jnp.int32)
        self._slots, _ = device.decode(self._static, zeros, self._slots, settings.decode_tokens, stop_ids)
        self._slots = device.release(self._slots, jnp.zeros(settings.slots, bool))
        if settings.kv_policy is KvPolicy.RECOMPUTE:
            device.prefill(self._static, zeros, jnp.zeros((settings.slots, settings.max_length), jnp.int32))
        jax.block_until_ready(self._slots.token)

    def _wait_for_work(self) -> bool:
        """Blocks until there is something to do; False once closed."""
        with self._wake:
            while not self._closed:
                ready = self._params is not None and any(map(self._admissible, self._waiting))
                if self._swap is not None or ready or any(e is not None for e in self._running):
                    return True
                self._wake.wait()
            return False

    def _apply_swap(self) -> None:
        swap = self._swap
        if swap is None:
            return
        started = time.perf_counter()
        first = self._params is None
        self._params, self._version = swap.params, swap.update.version
        stopped = [
            index
            for index, entry in enumerate(self._running)
            if entry is not None and entry.request.exact_version not in (None, self._version)
        ]
        for index in stopped:
            self._finish(index, FinishReason.ABORT)
        if stopped:
            mask = np.zeros(self.settings.slots, bool)
            mask[stopped] = True
            self._slots = device.release(self._slots, jnp.asarray(mask))
        if self.settings.kv_policy is KvPolicy.RECOMPUTE and not first:
            self._recompute()
        pause = time.perf_counter() - started
        with self._wake:  # only now: `_fail` rejects the swap if something above raised
            if self._swap is swap:
                self._swap = None
        resolve(swap.loop, swap.done, pause)

    def _recompute(self) -> None:
        """Rebuilds the cache of every running request under the new weights."""
        tokens = np.zeros((self.settings.slots, self.settings.max_length), np.int32)
        for index, entry in enumerate(self._running):
            if entry is not None:
                sequence = [*entry.request.prompt_ids, *entry.tokens]
                tokens[index, : len(sequence)] = sequence
        cache, _ = device.prefill(self._static, self._params, jnp.asarray(tokens))
        self._slots = device.with_cache(self._slots, cache)
        jax.block_until_ready(self._slots.token)

    def _admissible(self, entry: Running) -> bool:
        if self._version is None:
            return False
        request = entry.request
        minimum = max(request.minimum_version or 0, request.exact_version or 0)
        return self._version >= minimum

    def _admit(self) -> None:
        """Moves waiting requests into free slots, up to `prompts` distinct prompts."""
        version = self._version
        if self._params is None or version is None:
            return
        free = [index for index, entry in enumerate(self._running) if entry is None]
        chosen: list[tuple[int, Running]] = []
        distinct: dict[tuple[int, ...], int] = {}
        with self._wake:
            kept: deque[Running] = deque()
            while self._waiting:
                entry = self._waiting.popleft()
                if entry.future.cancelled():
                    continue
                exact = entry.request.exact_version
                if exact is not None and exact < version:
                    self._deliver(entry, FinishReason.ABORT)
                    continue
                prompt = tuple(entry.request.prompt_ids)
                room = prompt in distinct or len(distinct) < self.settings.prompts
                if len(chosen) < len(free) and room and self._admissible(entry):
                    distinct.setdefault(prompt, len(distinct))
                    slot = free[len(chosen)]
                    chosen.append((slot, entry))
                    self._running[slot] = entry  # in one of the two lists at any time: `_fail` reads both
                else:
                    kept.append(entry)
            self._waiting = kept
        if chosen:
            self._insert(chosen, distinct)

    def _insert(self, chosen: list[tuple[int, Running]], distinct: Mapping[tuple[int, ...], int]) -> None:
        settings = self.settings
        tokens = np.zeros((settings.prompts, settings.max_prompt), np.int32)
        for prompt, row in distinct.items():
            tokens[row, : len(prompt)] = prompt
        cache, experts = device.prefill(self._static, self._params, jnp.asarray(tokens))
        entry_arrays = {
            name: np.zeros(settings.slots, np.int32) for name in ("source", "token", "position", "limit")
        }
        slot = np.full(settings.slots, settings.slots, np.int32)
        temperature = np.zeros(settings.slots, np.float32)
        seed = np.zeros(settings.slots, np.uint32)
        captured = np.asarray(experts) if settings.capture_routed_experts else None
        for row, (index, entry) in enumerate(chosen):
            request = entry.request
            prompt = tuple(request.prompt_ids)
            slot[row], temperature[row] = index, request.temperature
            seed[row] = request.seed & 0xFFFFFFFF
            entry_arrays["source"][row] = distinct[prompt]
            entry_arrays["token"][row] = prompt[-1]
            entry_arrays["position"][row] = len(prompt) - 1
            entry_arrays["limit"][row] = request.max_tokens
            entry.started = time.perf_counter()
            if captured is not None:
                entry.prompt_experts = captured[distinct[prompt], : len(prompt) - 1]
        self._slots = device.insert(
            self._slots,
            cache,
            device.Insertion(slot=slot, temperature=temperature, seed=seed, **entry_arrays),
        )

    def _decode(self) -> None:
        """Decodes a few tokens for every slot."""
        width = max((len(e.request.stop_ids) for e in self._running if e is not None), default=0)
        stop_ids = np.full((self.settings.slots, max(STOP_WIDTH, width)), -1, np.int32)
        for index, entry in enumerate(self._running):
            if entry is not None:
                stop_ids[index, : len(entry.request.stop_ids)] = list(entry.request.stop_ids)
        self._slots, decoded = device.decode(
            self._static, self._params, self._slots, self.settings.decode_tokens, jnp.asarray(stop_ids)
        )
        tokens, logprobs, valid = (np.asarray(x) for x in (decoded.tokens, decoded.logprobs, decoded.valid))
        experts = np.asarray(decoded.experts) if self.settings.capture_routed_experts else None
        active = np.asarray(self._slots.active)
        assert self._version is not None
        cancelled = np.zeros(self.settings.slots, bool)
        for index, entry in enumerate(self._running):
            if entry is None:
                continue
            made = valid[:, index]
            entry.extend(self._version, tokens[made, index], logprobs[made, index])
            if experts is not None:
                entry.experts.append(experts[made, index])
            self._generated += int(made.sum())
            if entry.future.cancelled() and active[index]:
                cancelled[index] = True
                self._finish(index, FinishReason.ABORT)
            elif not active[index]:
                stopped = bool(entry.tokens) and entry.tokens[-1] in entry.request.stop_ids
                self._finish(index, FinishReason.STOP if stopped else FinishReason.LENGTH)

        if cancelled.any():
            self._slots = device.release(self._slots, jnp.asarray(cancelled))

    def _finish(self, index: int, reason: FinishReason) -> None:
        entry, self._running[index] = self._running[index], None
        assert entry is not None
        self._deliver(entry, reason)

    def _deliver(self, entry: Running, reason: FinishReason) -> None:
        completion = Completion(
            request_id=entry.request.request_id,
            token_ids=np.asarray(entry.tokens, np.int32),
            logprobs=np.asarray(entry.logprobs, np.float32),
            spans=tuple(entry.spans),
            finish_reason=reason,
            kv_policy=self.settings.kv_policy,
            seconds=time.perf_counter() - entry.started if entry.started else 0.0,
            routed_experts=routed_experts(entry) if self.settings.capture_routed_experts else None,
        )
        resolve(entry.loop, entry.future, completion)

    def _fail(self, reason: str) -> None:
        with self._wake:
            self._failure = reason
            entries = [e for e in [*self._running, *self._waiting] if e is not None]
            self._waiting.clear()
            self._running = [None] * self.settings.slots
            swap, self._swap = self._swap, None
        for entry in entries:
            reject(entry.loop, entry.future, EngineError(reason))
        if swap is not None:
            reject(swap.loop, swap.done, EngineError(reason))
