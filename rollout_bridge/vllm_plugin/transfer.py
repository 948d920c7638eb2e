"""A vLLM weight transfer engine whose transport is a directory: the mirror of the weight chain.

Two steps. `stage`, while tokens are still made: work out the whole leaf modules that changed, map or
dequantise their tensors. Then, inside the pause, `start`, `update`, `finish`: layerwise reload from what was
staged. Nothing is read from anywhere but the mirror, and a failure while staging has touched no weight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
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

from rollout_bridge.vllm_plugin.tensors import MirrorTensors
from rollout_bridge.vllm_plugin.units import whole_units

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
    """Stage `version` from `mirror`. changed: Hugging Face names, None for every tensor."""

    version: int
    mirror: Path
    changed: tuple[str, ...] | None


class Staging:
    """One version being staged on a thread of its own, or the outcome."""

    def __init__(self, request: StageRequest, model: torch.nn.Module, *, native_fp8: bool) -> None:
        self.request = request
        self.weights: list[tuple[str, torch.Tensor]] = []
        self.error: str | None = None
        self.seconds = 0.0
        self._model = model
        self._native_fp8 = native_fp8
        self._thread = threading.Thread(target=self._run, name=f"stage-v{request.version}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            tensors = MirrorTensors(self.request.mirror, version=self.request.version)
            packed = getattr(self._model, "packed_modules_mapping", {})
            changed = tensors.names if self.request.changed is None else self.request.changed
            names = whole_units(changed, tensors.names, packed)
            self.weights = list(tensors.load(names, native_fp8=self._native_fp8))
        except Exception as error:  # reported to the agent by `status`, which raises it there
            logger.exception("staging version %d from %s failed", self.request.version, self.request.mirror)
            self.error = f"{type(error).__name__}: {error}"
        self.seconds = time.perf_counter() - began

    def status(self) -> dict[str, Any]:
        """{"version", "state": "staging" | "ready" | "failed", "tensors", "seconds", "error"}."""
        state = "staging" if self._thread.is_alive() else "failed" if self.error else "ready"
        return {
            "version": self.request.version,
            "state": state,
            "tensors": len(self.weights),
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

    def stage(self, request: StageRequest) -> None:
        """Begin staging, in place of whatever was staged before. Returns at once; see `stage_status`."""
        self._staging = Staging(
            request, self._default_model, native_fp8=self.vllm_config.quant_config is not None
        )

    def stage_status(self) -> dict[str, Any]:
        if self._staging is None:
            return {"state": "idle", "version": None, "tensors": 0, "seconds": 0.0, "error": None}
        return self._staging.status()

    def start_weight_update(self) -> None:
        if self._staging is None or self._staging.status()["state"] != "ready":
            raise RuntimeError(
                f"start_weight_update with staging {self.stage_status()}: stage a version first, and wait "
                "until it is ready"
            )
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MirrorUpdateInfo) -> None:
        staging = self._staging
        if staging is None or staging.request.version != update_info.version:
            raise RuntimeError(f"version {update_info.version} asked for, staged is {self.stage_status()}")
        model: Any = self.model  # vLLM's models have load_weights; torch's type does not say so
        with repacked_experts(model) if self.device.type == "cpu" else nullcontext():
            loaded = model.load_weights(staging.weights)
        if staging.weights and not loaded:
            raise RuntimeError(f"the model took none of the {len(staging.weights)} staged tensors")

    def finish_weight_update(self) -> None:
        with quiet_reload():
            finalize_layerwise_reload(self.model, self.model_config)
        self._staging = None  # drops the mapped pages and host copies

    def shutdown(self) -> None:
        self._staging = None
