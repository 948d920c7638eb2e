"""A vLLM weight transfer engine whose transport is a directory: the mirror of the weight chain.

Two steps. `stage`, while tokens are still made: work out the whole leaf modules that changed, map or
dequantise their tensors. Then, inside the pause, `start`, `update`, `finish`: layerwise reload from what was
staged. Nothing is read from anywhere but the mirror, and a failure while staging has touched no weight.

Every worker of every rank does the same from the same mirror, and reports by a file of its own: with several
data-parallel engines vLLM hands on only the first one's answer to a call.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout_bridge.files import write_whole
from rollout_bridge.vllm_plugin.experts import LayerExperts, Stacked, routed_experts, stack
from rollout_bridge.vllm_plugin.tensors import MirrorTensors
from rollout_bridge.vllm_plugin.units import held_here, units_of, untouched_units, whole_units

logger = logging.getLogger(__name__)

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class MirrorInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand: every stage call names its mirror."""


@dataclass
class MirrorUpdateInfo(WeightTransferUpdateInfo):
    """Load what was staged for `version`."""

    version: int


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """Stage `version` from `mirror`. changed: Hugging Face names, None for every tensor.

    reports: directory in which each worker says when it has staged (`staged-<rank>.json`, what
    `Staging.status` returns) and when it has loaded (`loaded-<rank>.json`, {"version", "load_ms"}).
    """

    version: int
    mirror: Path
    changed: tuple[str, ...] | None
    reports: Path


class Staging:
    """One version being staged on a thread of its own, or the outcome."""

    def __init__(
        self,
        request: StageRequest,
        model: torch.nn.Module,
        *,
        rank: int,
        native_fp8: bool,
        experts: Mapping[str, LayerExperts],
        layers: int,
        pin: bool,
    ) -> None:
        self.request = request
        self.names: list[str] = []
        self.units: list[str] = []
        self.weights: list[tuple[str, torch.Tensor]] = []
        self.error: str | None = None
        self.seconds = 0.0
        self.load_ms = 0.0
        self._state = "staging"
        self._model = model
        self._rank = rank
        self._native_fp8 = native_fp8
        self._experts = experts
        self._layers = layers
        self._pin = pin
        self.stacked: list[Stacked] = []
        self.give_back: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name=f"stage-v{request.version}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            tensors = MirrorTensors(self.request.mirror, version=self.request.version)
            packed = getattr(self._model, "packed_modules_mapping", {})
            changed = tensors.names if self.request.changed is None else self.request.changed
            names = whole_units(changed, tensors.names, packed)
            local = {unit: experts.local for unit, experts in self._experts.items()}
            here = held_here(names, local, packed)
            weights = self._recorded(tensors.load(here, native_fp8=self._native_fp8))
            self.stacked, self.weights = stack(weights, self._experts, pin=self._pin)
            self.units = units_of(self.names, packed, layers=self._layers)
        except Exception as error:  # reported to the agent by `status`, which raises it there
            logger.exception("staging version %d from %s failed", self.request.version, self.request.mirror)
            self.error = f"{type(error).__name__}: {error}"
        self.seconds = time.perf_counter() - began
        self._state = "failed" if self.error else "ready"
        self._report("staged", self.status())

    def _recorded(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.names.append(name)
            yield name, tensor

    def loaded(self) -> None:
        """Say that this worker has the version; the client reports it when all have."""
        self._report("loaded", {"version": self.request.version, "load_ms": self.load_ms})

    def _report(self, what: str, content: dict[str, Any]) -> None:
        path = self.request.reports / f"{what}-{self._rank}.json"
        write_whole(path, json.dumps(content))

    def status(self) -> dict[str, Any]:
        """{"version", "state": "staging" | "ready" | "failed", "tensors", "stacked", "seconds", "error"}."""
        return {
            "version": self.request.version,
            "state": self._state,
            "tensors": len(self.names),
            "stacked": len(self.stacked),
            "seconds": self.seconds,
            "error": self.error,
        }


@contextmanager
def quiet_reload() -> Iterator[None]:
    """Drop vLLM's warning about every module that an update leaves alone; it is the normal case here."""

    def keep(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    reload_logger = logging.getLogger(RELOAD_LOGGER)
    reload_logger.addFilter(keep)
    try:
        yield
    finally:
        reload_logger.removeFilter(keep)


@contextmanager
def repacked_experts(model: torch.nn.Module) -> Iterator[None]:
    """Let the routed experts reloaded inside be packed for the CPU kernel, as on a first load.

    vLLM 0.32 skips `fused_experts.process_weights_after_loading` once a layer has a kernel, so reloaded
    experts would stay in checkpoint layout and be read as packed: finite numbers, all wrong. Without its
    kernel a layer that is reloaded builds a new one, packing included; one that is not gets its old one back.
    """
    kernels: dict[Any, Any] = {}
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            kernels[method] = method.moe_kernel
            method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel


class MirrorWeightTransferEngine(WeightTransferEngine[MirrorInitInfo, MirrorUpdateInfo]):
    """Loads staged tensors by layerwise reload, which also re-packs CPU layers and keeps CUDA graph storage.

    A model served with block FP8 gets codes and `weight_scale_inv` as they are; any other gets the BF16
    values of the same numbers, which power-of-two scales make exact.
    """

    init_info_cls = MirrorInitInfo
    update_info_cls = MirrorUpdateInfo
    supports_draft_weight_update = False

    _staging: Staging | None = None

    def init_transfer_engine(self, init_info: MirrorInitInfo) -> None:
        del init_info

    @property
    def global_rank(self) -> int:
        """Of this worker among all that serve the model, data-parallel engines included."""
        parallel = self.vllm_config.parallel_config
        return parallel.data_parallel_index * parallel.world_size + parallel.rank

    def stage(self, request: StageRequest) -> None:
        """Begin staging, in place of whatever was staged before. Returns at once; see `stage_status`."""
        self._staging = Staging(
            request,
            self._default_model,
            rank=self.global_rank,
            native_fp8=self.vllm_config.quant_config is not None,
            # Balancing replicates experts and moves them: the model's loader places all of them then.
            experts={} if self.parallel_config.enable_eplb else routed_experts(self._default_model),
            layers=self.model_config.hf_text_config.num_hidden_layers,
            pin=self.device.type == "cuda",
        )

    def stage_status(self) -> dict[str, Any]:
        if self._staging is None:
            return {"state": "idle", "version": None, "tensors": 0, "seconds": 0.0, "error": None}
        return self._staging.status()

    def start_weight_update(self) -> None:
        staging = self._staging
        if staging is None or staging.status()["state"] != "ready":
            raise RuntimeError(
                f"start_weight_update with staging {self.stage_status()}: stage a version first, and wait "
                "until it is ready"
            )
        with _timed(staging):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MirrorUpdateInfo) -> None:
        """Raises RuntimeError if the model leaves a module without the tensors staged for it."""
        staging = self._staging
        if staging is None or staging.request.version != update_info.version:
            raise RuntimeError(f"version {update_info.version} asked for, staged is {self.stage_status()}")
        model: Any = self.model  # vLLM's models have load_weights; torch's type does not say so
        with _timed(staging), repacked_experts(model) if self.device.type == "cpu" else nullcontext():
            staging.give_back = [stacked.load() for stacked in staging.stacked]
            loaded: set[str] = model.load_weights(staging.weights) or set()
        left_out = untouched_units(staging.units, loaded | {stacked.name for stacked in staging.stacked})
        if left_out:
            raise RuntimeError(
                f"version {update_info.version}: the model took no tensor of {len(left_out)} modules, "
                f"{left_out[:3]} first: they would keep older weights"
            )

    def finish_weight_update(self) -> None:
        staging = self._staging
        if staging is None:
            raise RuntimeError("finish_weight_update without a staged version")
        with _timed(staging), quiet_reload():
            finalize_layerwise_reload(self.model, self.model_config)
            for give_back in staging.give_back:
                give_back()
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
        self._staging = None  # drops the mapped pages and host copies
        staging.loaded()

    def shutdown(self) -> None:
        self._staging = None


@contextmanager
def _timed(staging: Staging) -> Iterator[None]:
    """Adds to the time that loading and packing the staged tensors takes."""
    began = time.perf_counter()
    try:
        yield
    finally:
        staging.load_ms += 1e3 * (time.perf_counter() - began)
