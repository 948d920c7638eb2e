"""What a weight update costs, as a formula, and what it says of GLM-4.5 355B on 8 H200.

    python benchmarks/weight_sync_model.py [RESULTS.jsonl]

RESULTS: rows of benchmarks/weight_sync.py. The two unit costs of loading (a tensor, a byte) are fitted to
the first two models and the rest are predicted with them. Prints one JSON object; see docs/weight-sync.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.model import ModelSection
from rollout_bridge import architectures
from rollout_bridge.quantization.plan import BLOCK, Format, ServingLayout, plan_for

GLM_VOCABULARY = 151_552
BATCH_BYTES = 1 << 26  # of what one process decodes at once, where there is much


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One version of one model, and one rank of the engine that takes it.

    full_bytes: of the BF16 checkpoint, which codec speeds refer to. delta_bytes: of the version. tensors: in
    its manifest, scales included. rank_bytes, rank_tensors: what one rank copies to its memory, and the
    checkpoint's tensors it handles for that.
    """

    full_bytes: float
    delta_bytes: float
    tensors: float
    rank_bytes: float
    rank_tensors: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes a second, seconds.

    encode, decode, apply: BF16 bytes a second of one core, of which there are encode_cores and decode_cores
    (decode up to the journal, apply from there to the mirror). What gains nothing from more cores: batch, of
    the process that hands one of `BATCH_BYTES` to others; decode_tensor, with reading the manifest, and
    apply_tensor, of a tensor in that process. manifest: of a tensor, to write it. verify: the second look.
    link: from trainer to store and from store to host. copy: host memory to one rank's memory. tensor: of one
    tensor in the engine's loader. pack: bytes a second of a pass over a rank's weights (read and written), of
    which there are pack_passes. control: of the calls of an update together.
    """

    encode: float
    encode_cores: float
    decode: float
    apply: float
    decode_cores: float
    batch: float
    decode_tensor: float
    apply_tensor: float
    verify: float
    manifest: float
    link: float
    copy: float
    tensor: float
    pack: float
    pack_passes: float
    control: float


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds. Sums, nothing overlapped: an upper bound of what `rates` allow."""

    encode: float
    upload: float
    download: float
    decode: float
    apply: float
    manifest: float
    pause: float
    publish_to_served: float


def predict(work: Workload, rates: Rates) -> Stages:
    """publish_to_served = encode + upload + download + decode + apply + manifest + pause, each work / rate.

    decode = bytes / (rate x cores) + batches x batch + tensors x decode_tensor, though handing out and
    decoding overlap; apply = bytes / (rate x cores) + tensors x apply_tensor + verify.
    pause = control + rank_tensors x tensor + rank_bytes / copy + pack_passes x 2 rank_bytes / pack.
    Staging is not in it: an FP8 engine maps the mirror's pages.
    """
    encode = work.full_bytes / (rates.encode * rates.encode_cores)
    batches = work.full_bytes / 2 / BATCH_BYTES  # of FP8 codes
    decode = (
        work.full_bytes / (rates.decode * rates.decode_cores)
        + batches * rates.batch
        + work.tensors * rates.decode_tensor
    )
    apply = (
        work.full_bytes / (rates.apply * rates.decode_cores)
        + work.tensors * rates.apply_tensor
        + rates.verify
    )
    manifest = work.tensors * rates.manifest
    transfer = work.delta_bytes / rates.link
    pause = (
        rates.control
        + work.rank_tensors * rates.tensor
        + work.rank_bytes / rates.copy
        + rates.pack_passes * 2 * work.rank_bytes / rates.pack
    )
    return Stages(
        encode=encode,
        upload=transfer,
        download=transfer,
        decode=decode,
        apply=apply,
        manifest=manifest,
        pause=pause,
        publish_to_served=encode + 2 * transfer + decode + apply + manifest + pause,
    )


def glm_4_5(*, delta_bytes_per_weight: float, ranks: int = 8, stacked: bool = False) -> Workload:
    """The 355B model on `ranks` GPUs, tensor- and expert-parallel. MTP layers are not served.

    stacked: a layer's experts count as 4 tensors (two matrices, two scales) instead of each for itself.
    """
    section = ModelSection.model_validate({"preset": "glm-4.5", "num_nextn_predict_layers": 0})
    model = section.decoder(vocab_size=GLM_VOCABULARY)
    sources = architectures.tensors(model)
    layout = ServingLayout(tensor_parallel=ranks, expert_parallel=True)
    plan = plan_for(sources, serving=layout)
    weights = tensors = rank_bytes = rank_tensors = 0.0
    for name, shape in ((source.name, source.shape) for source in sources):
        size, form = math.prod(shape), plan.formats[name]
        weights += size
        tensors += 1 + (form is Format.fp8_block)
        fp8 = form is Format.fp8_block
        scales = math.prod(-(-n // b) for n, b in zip(shape, BLOCK, strict=True)) if fp8 else 0
        rank_bytes += (size * {Format.fp8_block: 1, Format.bf16: 2, Format.f32: 4}[form] + 4 * scales) / ranks
        if ".mlp.experts." not in name:
            rank_tensors += 1 + fp8  # every rank reads them, and copies its slice
        elif not stacked:
            rank_tensors += 2 / ranks
    if stacked:
        rank_tensors += 4 * model.num_moe_layers
    return Workload(
        full_bytes=2 * weights,
        delta_bytes=delta_bytes_per_weight * weights,
        tensors=tensors,
        rank_bytes=rank_bytes,
        rank_tensors=rank_tensors,
    )


# Measured by benchmarks/delta.py, preset `fast`, 4096x4096, RMS 1e-6 and 1e-5, interpolated (log-log) to
# 2e-6, which is what Muon does at a learning rate of 1e-5: bytes a weight, BF16 bytes a second of one core.
DELTA_BYTES_PER_WEIGHT = 0.0063
ENCODE = 1.6e9
# Measured by benchmarks/weight_sync_decode.py --experts 12, RMS 1e-6: decoding, digests and journal by one
# process, setting the bits by one, handing out a batch, and looking at 64 MB a second time.
DECODE, APPLY, BATCH, VERIFY = 2.25e9, 7.8e9, 0.96e-3, 0.15
# The same with 21,650 tensors (--layers 23 --experts 160 --hidden 128 --intermediate 128): processor seconds
# of the process that hands out, a tensor.
DECODE_TENSOR, APPLY_TENSOR = 50e-6, 4e-6
MANIFEST = 20e-6  # seconds a tensor to make and write (pydantic, JSON; one core); reading is in DECODE_TENSOR
# Data sheets: PCIe 5.0 x16 64 GB/s of which 50 are reached from pinned memory; HBM3e of an H200 4.8 TB/s, of
# which 80% are reached; two CPUs of 48 cores or more. Assumed: 15 GB/s from memory that is not pinned.
H200 = Rates(
    encode=ENCODE,
    encode_cores=256,  # 32 trainer hosts would have thousands
    decode=DECODE,
    apply=APPLY,
    decode_cores=48,
    batch=BATCH,
    decode_tensor=DECODE_TENSOR,
    apply_tensor=APPLY_TENSOR,
    verify=VERIFY,
    manifest=MANIFEST,
    link=1.25e9,
    copy=50e9,
    tensor=200e-6,
    pack=0.8 * 4.8e12,
    pack_passes=3,  # copied in, repacked, copied over the old weights
    control=0.05,
)


def fit(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """(seconds a tensor, seconds a byte) of loading, from exactly two measured models."""
    matrix = np.array([[row["detail"]["loader_tensors"], row["full_bytes"]] for row in rows])
    loads = np.array([row["load_and_pack_ms"] / 1e3 for row in rows])
    tensor, byte = np.linalg.solve(matrix, loads)
    return float(tensor), float(byte)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?")
    arguments = parser.parse_args()
    cases = {
        "as built": (H200, True),
        "memory not pinned": (dataclasses.replace(H200, copy=15e9), True),
        "experts one by one": (H200, False),
        "one decoding process": (dataclasses.replace(H200, decode_cores=1), True),
    }
    found: dict[str, Any] = {}
    for case, (rates, stacked) in cases.items():
        work = glm_4_5(delta_bytes_per_weight=DELTA_BYTES_PER_WEIGHT, stacked=stacked)
        found[case] = dataclasses.asdict(work) | {
            f"{name}_s": seconds for name, seconds in dataclasses.asdict(predict(work, rates)).items()
        }
    report: dict[str, Any] = {"glm4_5_355b_on_8_h200": found}
    if arguments.results is not None:
        rows = [json.loads(line) for line in arguments.results.read_text().splitlines() if line.strip()]
        tensor, byte = fit(rows[:2])
        report["fit"] = {"ms_per_tensor": 1e3 * tensor, "gb_per_s": 1e-9 / byte}
        report["load_and_pack_ms"] = {
            row["model"]: {
                "predicted": 1e3 * (tensor * row["detail"]["loader_tensors"] + byte * row["full_bytes"]),
                "measured": row["load_and_pack_ms"],
            }
            for row in rows
        }
        report["pause_less_load_ms"] = {
            row["model"]: row["pause_ms_p50"] - row["load_and_pack_ms"] for row in rows
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
