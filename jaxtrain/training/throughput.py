"""Tokens a second and MFU of a step, counted from the documents of its batch, without padding.

MFU (PaLM, arXiv 2204.02311, appendix B) is model FLOPs a second over the devices' peak. The head is counted
for every valid token, also where no loss is taken and the token is not projected. The peak is the published
dense BF16 rate, also of a run that computes in float32. Devices without a published rate, such as CPUs, have
no MFU: the metric is then absent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxtrain.data.batch import Batch
from jaxtrain.models.flops import Flops

# Dense BF16 operations a second of one jax device, by the first words of its device_kind; data sheets.
PEAKS = {
    "TPU v3": 61.5e12,  # a device is one of a chip's two cores
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,  # a device is one of a chip's two chiplets
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X": 1307e12,
}


def peak(device: Any) -> float | None:
    """Peak operations a second of a jax device, by its longest matching name in `PEAKS`, else None."""
    kind = device.device_kind
    fitting = [name for name in PEAKS if kind.startswith(name) and not kind[len(name) :][:1].isalnum()]
    return PEAKS[max(fitting, key=len)] if fitting else None


def throughput(
    batch: Batch, flops: Flops, *, seconds: float, devices: int, device_peak: float | None
) -> dict[str, float]:
    """`tokens_per_s`, `model_tflops_per_s`, and `mfu` where the peak is known, of a step of `seconds`.

    Padding is not counted, and a query counts the keys of its own document: a batch of short documents has
    fewer operations than one of long ones. batch: the whole batch of all devices. devices: how many trained
    on it.
    """
    valid = np.asarray(batch.segment_ids) > 0
    tokens = batch.valid_tokens()
    pairs = int(np.sum(np.asarray(batch.positions, np.int64)[valid] + 1))
    rate = flops.total(tokens=tokens, pairs=pairs) / seconds
    found = {"tokens_per_s": tokens / seconds, "model_tflops_per_s": rate * 1e-12}
    return found if device_peak is None else found | {"mfu": rate / (device_peak * devices)}
