"""Size and speed of weight updates as the codec writes them, against the entropy of the update and against
other codecs.

    python benchmarks/delta.py [--arc DIR] [--versions DIR ...] [--rms 1e-7 1e-6 1e-5 1e-4] [--repeats 3]

Prints one JSON row for each case, format (`fp8`: block-FP8 codes, `bf16`) and preset. Cases: Gaussian weights
of deviation 0.02 that take a Gaussian update of the given root mean square; a set of small matrices in one
blob, as a quickstart model publishes them; and with `--versions` consecutive versions of real weights. DIR is
a run (its last two published versions, replayed by a subscriber, every digest checked), or a directory of
Hugging Face directories, as `update_sparsity.py --save` writes (the first two by name).

`entropy_bytes` is the reference: size * H(new | old) / 8, with the empirical distribution of the new value
for each old value; arrays of one dtype and shape share theirs, as the trainer stacks them. Position-blind and
free of charge for its tables, it is a yardstick, not a bound: knowing block scales would lower it a few
percent, and of an array with fewer elements than BF16 has values it says little. `xor_zstd_bytes`: byte
planes of old XOR new under zstandard level 1. `arc_v2_bytes`, `arc_v3_bytes`: the public codec
`fireworks-delta-compression` on the BF16 weights of the same update, whatever the format (of a run's
versions, on the weights as served); null without `--arc DIR`, which installs it into DIR when it is not
there. It needs torch. arc_v3 tries five codings at once and keeps the smallest of those that end within 1.5
times the first one's seconds, so that its bytes depend on the machine and on what else runs: the bytes here
are those of the smallest of all five, its speed is with its own impatience.

Speeds are BF16 bytes of the weights (two an element, whatever the format) over the processor time of the best
repeat: what one core does, whatever else runs on the machine. Ours is of the one thread it uses: codings that
arc_v3 no longer waits for go on beside it. Encoding finds the changes too; decoding applies them to a copy.
`memcpy_gb_s`: the same bytes copied.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors import safe_open

from rollout_bridge import architectures, delta
from rollout_bridge.quantization import host
from rollout_bridge.quantization.plan import Format, plan_for, scale_name
from rollout_bridge.store import Store
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.subscriber import Subscriber

PRESETS = ("small", "fast")
WEIGHT_DEVIATION = 0.02
SMALL_ROWS = (128, 256, 384, 512)
SMALL_MATRICES = 100
ARC = "fireworks_delta_compression"
ARC_PATIENCE = 1.5  # its own default
ARC_ALL_CODINGS = 1e6

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Case:
    """An update. bf16: (old, new) bits of each array. published: the arrays of each format, as published."""

    name: str
    bf16: list[Pair]
    published: dict[str, list[Pair]]


def gaussian(name: str, shapes: Sequence[tuple[int, int]], *, rms: float) -> Case:
    """Matrices of `shapes` and a Gaussian update of root mean square `rms`."""
    bf16 = []
    for seed, shape in enumerate(shapes):
        rng = np.random.default_rng(seed)
        weights = (rng.standard_normal(shape) * WEIGHT_DEVIATION).astype(np.float32)
        moved = weights + (rng.standard_normal(shape) * rms).astype(np.float32)
        bf16.append((host.float32_to_bfloat16_bits(weights), host.float32_to_bfloat16_bits(moved)))
    codes = [(host.quantize_block_fp8(old)[0], host.quantize_block_fp8(new)[0]) for old, new in bf16]
    return Case(f"{name} rms {rms:g}", bf16, {"fp8": codes, "bf16": bf16})


def versions(directory: Path) -> Case:
    """Two consecutive versions of real weights; the `fp8` format has scales and unquantised tensors too."""
    store = directory / "store"
    return run_versions(directory.name, store) if store.is_dir() else saved_versions(directory)


def run_versions(name: str, store: Path) -> Case:
    """The last two versions of the run that wrote `store`; only what it published is known of them."""
    with tempfile.TemporaryDirectory() as folder:
        mirror = Mirror(folder)
        subscriber = Subscriber(Store.open(str(store)), mirror)
        latest = subscriber.latest()
        if latest is None or latest.version < 2:
            raise SystemExit(f"{store}: holds fewer than two versions; let the run publish more")
        subscriber.advance(latest.version - 1)
        held = list(mirror.view.specs)
        before = {tensor: mirror.tensor(tensor).copy() for tensor in held}
        subscriber.advance(latest.version)
        pairs = {tensor: (before[tensor], mirror.tensor(tensor).copy()) for tensor in held}
        mirror.close()
    bf16 = []
    for tensor, pair in pairs.items():
        scales = pairs.get(scale_name(tensor)) if pair[0].dtype == np.uint8 else None
        if scales is not None:
            bf16.append(
                (
                    host.dequantize_block_fp8(pair[0], scales[0].view(np.float32), name=tensor),
                    host.dequantize_block_fp8(pair[1], scales[1].view(np.float32), name=tensor),
                )
            )
        elif pair[0].dtype == np.uint16:
            bf16.append(pair)
    case = f"{name}: versions {latest.version - 1} and {latest.version}"
    return Case(case, bf16, {"fp8": list(pairs.values())})


def saved_versions(directory: Path) -> Case:
    """The first two Hugging Face directories in `directory`, BF16."""
    found = sorted(path for path in directory.iterdir() if (path / "model.safetensors").exists())[:2]
    if len(found) < 2:
        raise SystemExit(f"{directory}: holds fewer than two Hugging Face directories, nor a run's store/")
    old, new = (_tensors(path) for path in found)
    config = json.loads((found[0] / "config.json").read_text())
    plan = plan_for(architectures.tensors(config), serving=None)
    bf16 = [(old[name], new[name]) for name in old]
    fp8: list[Pair] = []
    for name, pair in zip(old, bf16, strict=True):
        if plan.formats[name] is Format.fp8_block:
            (old_codes, old_scale), (new_codes, new_scale) = map(host.quantize_block_fp8, pair)
            fp8 += [(old_codes, new_codes), (old_scale.view(np.uint32), new_scale.view(np.uint32))]
        else:
            fp8.append(pair)
    return Case(directory.name, bf16, {"fp8": fp8, "bf16": bf16})


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    import ml_dtypes  # noqa: F401  (teaches numpy the name bfloat16)

    with safe_open(directory / "model.safetensors", "numpy") as file:
        return {name: file.get_tensor(name).view(np.uint16) for name in file.keys()}  # noqa: SIM118


def best_seconds(
    run: Callable[[], Any], repeats: int, *, clock: Callable[[], float] = time.thread_time
) -> tuple[Any, float]:
    """The result of `run` and the least processor time it took: of this thread, or as `clock` says."""
    result, best = None, float("inf")
    for _ in range(repeats):
        start = clock()
        result = run()
        best = min(best, clock() - start)
    return result, best


def entropy_bytes(pairs: Sequence[Pair]) -> float:
    """The reference, over arrays stacked by dtype and shape."""
    stacks: dict[tuple[np.dtype, tuple[int, ...]], list[Pair]] = defaultdict(list)
    for pair in pairs:
        stacks[pair[0].dtype, pair[0].shape].append(pair)
    return sum(
        delta.conditional_entropy_bytes(
            np.stack([old for old, _ in stack]), np.stack([new for _, new in stack])
        )
        for stack in stacks.values()
    )


def xor_zstd_bytes(pairs: Sequence[Pair]) -> int:
    """What needs no knowledge of the data."""
    compressor = zstandard.ZstdCompressor(level=1)
    return sum(
        len(compressor.compress((old ^ new).view(np.uint8).reshape(-1, old.itemsize).T.tobytes()))
        for old, new in pairs
    )


def install_arc(directory: Path) -> None:
    """Makes Fireworks' codec importable from `directory`."""
    if not (directory / ARC).is_dir():
        packages = ["fireworks-delta-compression", "zstd", "packaging"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory)]
        subprocess.run([*pip, *packages], check=True)
    sys.path.append(str(directory))


def arc_bytes(pairs: Sequence[Pair], version: str, *, patience: float = ARC_PATIENCE) -> int | None:
    """Bytes of Fireworks' codec on BF16 pairs, or None where it is not installed.

    patience: of the first coding's seconds, how many times as long arc_v3 waits for its other codings.
    """
    if importlib.util.find_spec(ARC) is None:
        return None
    torch = importlib.import_module("torch")
    importlib.import_module(f"{ARC}.backends.arc3")._CANDIDATE_WAIT_MULTIPLIER = patience
    compress = importlib.import_module(f"{ARC}.compression").delta_compress
    total = 0
    for old, new in pairs:
        source, target = (torch.from_numpy(bits.copy()).view(torch.bfloat16) for bits in (old, new))
        total += compress(src=source, dst=target, compression_format=version)[0].nbytes
    return total


def measure(case: Case, *, repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one case, one for each format and preset; all its arrays go into one blob."""
    nbytes = sum(old.nbytes for old, _ in case.bf16)
    source = np.concatenate([old.reshape(-1) for old, _ in case.bf16])
    target = np.empty_like(source)
    _, copying = best_seconds(lambda: np.copyto(target, source), max(3, repeats))
    arc2 = arc_bytes(case.bf16, "arc_v2")
    arc3 = arc_bytes(case.bf16, "arc_v3", patience=ARC_ALL_CODINGS)
    _, arc3_seconds = best_seconds(lambda: arc_bytes(case.bf16, "arc_v3"), 1, clock=time.process_time)
    for format, pairs in case.published.items():
        changed = sum(int(np.count_nonzero(old != new)) for old, new in pairs)
        entropy = round(entropy_bytes(pairs))
        xor = xor_zstd_bytes(pairs)
        olds = [old for old, _ in pairs]
        for preset in PRESETS:
            blobs, encoding = best_seconds(lambda pairs=pairs, preset=preset: write(pairs, preset), repeats)
            results, decoding = best_seconds(lambda blobs=blobs, olds=olds: read(blobs, olds), repeats)
            nbytes_ours = sum(len(blob) for _, blob in blobs)
            for (_, new), result in zip(pairs, results, strict=True):
                np.testing.assert_array_equal(result, new)
            yield {
                "case": case.name,
                "format": format,
                "preset": preset,
                "changed_fraction": changed / sum(old.size for old in olds),
                "ours_bytes": nbytes_ours,
                "entropy_bytes": entropy,
                "ours_over_entropy": round(nbytes_ours / max(entropy, 1), 3),
                "xor_zstd_bytes": xor,
                "arc_v2_bytes": arc2,
                "arc_v3_bytes": arc3,
                "bf16_bytes": nbytes,
                "encode_gb_s": round(nbytes / 1e9 / encoding, 3),
                "decode_gb_s": round(nbytes / 1e9 / decoding, 3),
                "memcpy_gb_s": round(nbytes / 1e9 / copying, 2),
                "arc_v3_encode_gb_s": round(nbytes / 1e9 / arc3_seconds, 3) if arc3 else None,
                "machine": platform.processor() or platform.machine(),
            }


def write(pairs: Sequence[Pair], preset: str) -> list[tuple[list[int], bytes]]:
    """The blobs of a version with these updates, each with the numbers of the arrays in it."""
    changes = [delta.ArrayChange.between(old, new) for old, new in pairs]
    groups = delta.together(changes)
    return [(group, delta.encode_group([changes[n] for n in group], preset=preset)) for group in groups]


def read(blobs: Sequence[tuple[list[int], bytes]], olds: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays after the updates of `write`: decoded and applied to a copy."""
    results = list(olds)
    for group, blob in blobs:
        if len(group) == 1:
            changes = [delta.decode_sparse(blob, olds[group[0]])]
        else:
            decoded = delta.decode_group(blob, olds[group[0]].dtype)
            changes = decoded.changes_of(range(len(group)), [olds[n] for n in group])
        for number, change in zip(group, changes, strict=True):
            if isinstance(change, delta.DenseChange):
                results[number] = change.values
                continue
            results[number] = olds[number].copy()
            results[number].reshape(-1)[change.indices] = change.values
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rms", type=float, nargs="*", default=[1e-7, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--versions", type=Path, nargs="*", default=[])
    parser.add_argument("--arc", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.arc is not None:
        install_arc(options.arc)
    small = [(SMALL_ROWS[number % len(SMALL_ROWS)], 128) for number in range(SMALL_MATRICES)]
    large = (options.rows, options.columns)
    cases: list[Callable[[], Case]] = []
    for rms in options.rms:
        cases.append(lambda rms=rms: gaussian(f"gaussian {large[0]}x{large[1]}", [large], rms=rms))
    for rms in options.rms:
        cases.append(lambda rms=rms: gaussian(f"gaussian {len(small)} x 128..512x128", small, rms=rms))
    cases += [lambda directory=directory: versions(directory) for directory in options.versions]
    for case in cases:
        for row in measure(case(), repeats=options.repeats):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
