"""Throughput and MFU by hand: padding is nothing, and short documents have fewer operations."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from jaxtrain.data.packing import Document, pack
from jaxtrain.models.flops import Flops
from jaxtrain.training.throughput import peak, throughput


def batch(*sizes: int):
    """Documents of sizes[i] predicted tokens, in rows of 8, four rows a microbatch."""
    return pack(
        [Document(tokens=np.ones(n + 1, np.int32), loss_weights=np.ones(n + 1, np.float32)) for n in sizes],
        rows=4,
        sequence_length=8,
    )


def test_by_hand():
    """Documents of 3 and 2 tokens: queries that see 1+2+3 and 1+2 keys; 27 positions are padding."""
    flops = Flops(per_token=100, per_pair=10)
    found = throughput(batch(3, 2), flops, seconds=0.5, devices=4, device_peak=500)
    assert found["tokens_per_s"] == 10.0
    assert found["model_tflops_per_s"] == pytest.approx((5 * 100 + 9 * 10) / 0.5 * 1e-12)
    assert found["mfu"] == pytest.approx(590 / 0.5 / (4 * 500))


def test_a_batch_of_twice_the_tokens_in_twice_the_time_has_the_same_mfu():
    flops = Flops(per_token=7, per_pair=3)
    small = throughput(batch(*[8] * 4), flops, seconds=1.0, devices=1, device_peak=1000)
    large = throughput(batch(*[8] * 8), flops, seconds=2.0, devices=1, device_peak=1000)
    assert large["mfu"] == pytest.approx(small["mfu"])
    assert large["tokens_per_s"] == pytest.approx(small["tokens_per_s"])


@dataclass
class Device:
    device_kind: str


@pytest.mark.parametrize(
    ("kind", "operations"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L400", None),
    ],
)
def test_peaks_are_found_by_the_longest_name_in_whole_words(kind, operations):
    assert peak(Device(kind)) == operations


def test_a_device_without_a_published_peak_has_no_mfu():
    assert peak(jax.devices()[0]) is None
    found = throughput(batch(3), Flops(1, 1), seconds=1.0, devices=1, device_peak=None)
    assert found.keys() == {"tokens_per_s", "model_tflops_per_s"}
