"""A run small enough to publish dozens of times: two layers, four experts; and what its chain must hold.

The oracle is the host quantiser applied to the parameters, tensor by tensor: no chain, no device, no codec.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from rollout_bridge import architectures
from rollout_bridge.architectures.tensors import paths, stacked_shape
from rollout_bridge.control import Ack
from rollout_bridge.quantization import host
from rollout_bridge.quantization.plan import Format, plan_for, scale_name
from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.subscriber import Subscriber
from rollout_bridge.weights.write.publisher import Publisher, WriterSettings

CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 1024,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_qk_norm": True,
    "attention_bias": True,
    "max_position_embeddings": 128,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 1.0,
}
Params = dict[str, np.ndarray]


def new_run() -> RunInfo:
    plan = plan_for(architectures.tensors(CONFIG), serving=None)
    return RunInfo.new(CONFIG, plan, tokenizer={"tokenizer.json": '{"version": "1.0"}'})


def open_store(name: str) -> Store:
    """A store in memory with a run in it; the same name is the same store. A path is a store on disk."""
    store = Store.open(name if name.startswith("/") else f"memory://{name}")
    if runs.load(store) is None:
        runs.create_or_join(store, new_run())
    return store


def params(seed: int = 0) -> Params:
    random = np.random.default_rng(seed)
    run = new_run()
    return {
        path: (0.02 * random.standard_normal(stacked_shape(group))).astype(np.float32)
        for path, group in paths(run.sources).items()
    }


def step(before: Params, seed: int, *, size: float = 2e-4, paths_changed: float = 1.0) -> Params:
    """A training step: every parameter moves a little; a quantised code only now and then."""
    random = np.random.default_rng(seed)
    return {
        path: array + size * random.standard_normal(array.shape).astype(np.float32)
        if random.random() < paths_changed
        else array
        for path, array in before.items()
    }


def on_device(tree: Params) -> dict[str, jax.Array]:
    return {path: jax.numpy.asarray(array) for path, array in tree.items()}


def canonical(run: RunInfo, tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a mirror must hold for `tree`."""
    result = {}
    for name, tensor in architectures.from_tree(run.hf_config, tree):
        match run.plan.formats[name]:
            case Format.fp8_block:
                codes, scale = host.quantize_block_fp8(host.float32_to_bfloat16_bits(tensor))
                result[name], result[scale_name(name)] = codes, scale.view(np.uint32)
            case Format.bf16:
                result[name] = host.float32_to_bfloat16_bits(tensor)
            case Format.f32:
                result[name] = np.ascontiguousarray(tensor).view(np.uint32)
    return result


def assert_holds(subscriber: Subscriber, tree: Params) -> None:
    expected = canonical(subscriber.mirror.view.run, tree)
    assert subscriber.mirror.view.specs.keys() == expected.keys()
    for name, bits in expected.items():
        np.testing.assert_array_equal(subscriber.mirror.tensor(name), bits, err_msg=name)


def publisher(store: Store, *, full_every: int = 100, **options) -> Publisher:
    """A trainer that has just started on `store`."""
    ours = {name: options.pop(name) for name in list(options) if name in WriterSettings.__annotations__}
    run = runs.load(store)
    assert run is not None
    settings = WriterSettings(**{"encoders": 2, "timeout": 5.0} | ours)
    return Publisher(store, run=run, full_every=full_every, settings=settings, **options)


def subscriber(store: Store, directory: Path, **options) -> Subscriber:
    return Subscriber(store, Mirror(directory), **options)


def acknowledge(store: Store, agent: str, version: int | None, **fields) -> None:
    """What an agent says that serves `version`."""
    counts = ("updates", "verified_tensors", "fallbacks", "setbacks", "broken_versions", "errors")
    others = {"incarnation": 1, "time": 0.0, "pause_ms": (), "last_error": ""} | dict.fromkeys(counts, 0)
    ack = Ack(**others | {"agent": agent, "version": version} | fields)
    store.put_json(ack.key, ack.to_json())


class Killed(BaseException):
    """The process died here: not an Exception, so nothing handles it."""


class Mortal(Store):
    """A store whose client dies at a write: before it reaches the store, or after.

    at: number of the write (from 1) that kills; 0: none.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.at = 0
        self.after = False
        self.writes = 0
        self.keys: list[str] = []
        self._counting = threading.Lock()

    def kill_at(self, write: int, *, after: bool = False) -> None:
        self.at, self.after, self.writes = write, after, 0

    def _write(self, key, data, generation):
        with self._counting:
            self.writes += 1
            dies = self.writes == self.at
            self.keys.append(key)
        if dies and not self.after:
            raise Killed(key)
        result = super()._write(key, data, generation)
        if dies:
            raise Killed(key)
        return result


class FailsOnce(Store):
    """A store whose next write to a key with this `ending` fails, before it reaches the store or after."""

    ending: str | None = None
    after = False

    def fail_at(self, ending: str, *, after: bool) -> None:
        self.ending, self.after = ending, after

    def _write(self, key, data, generation):
        if self.ending is None or not key.endswith(self.ending):
            return super()._write(key, data, generation)
        self.ending = None
        if self.after:
            super()._write(key, data, generation)
        raise StoreError(f"store {self.url}: write of {key!r} failed: connection reset")


class Unreachable(Store):
    """A store that fails for a while."""

    failing = False

    def _call(self, verb, key, start):
        if self.failing:
            raise StoreError(f"store {self.url}: {verb} of {key!r} failed: unreachable")
        return super()._call(verb, key, start)
