"""Size and speed of weight updates as the codec writes them, against the entropy of the update and against
other codecs.

    python benchmarks/delta.py [--rows 4096 --columns 4096 --rms 1e-7 1e-6 1e-5 1e-4 --repeats 3]

Prints one JSON row a case: Gaussian weights of deviation 0.02 that take a Gaussian update of the given root
mean square, as block-FP8 codes and as BF16, and a set of small matrices in one blob as a quickstart model
publishes them. Speeds are of BF16 bytes of the weights (two an element, whatever the format) over the
processor time of the best repeat: what one core does, whatever else runs on the machine. `arc_v2_bytes` and
`arc_v3_bytes` are null unless `fireworks-delta-compression` is installed, which this project does not need.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zstandard

from rollout_bridge import delta
from rollout_bridge.quantization import host

PRESETS = ("small", "fast")
FORMATS = ("fp8", "bf16")
WEIGHT_DEVIATION = 0.02
SMALL_ROWS = (128, 256, 384, 512)
SMALL_MATRICES = 100

Pair = tuple[np.ndarray, np.ndarray]


def update(rows: int, columns: int, *, rms: float, format: str, seed: int = 0) -> Pair:
    """Bits [rows, columns] before and after an update: codes uint8 for fp8, uint16 for bf16."""
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((rows, columns)) * WEIGHT_DEVIATION).astype(np.float32)
    old = host.float32_to_bfloat16_bits(weights)
    weights += (rng.standard_normal((rows, columns)) * rms).astype(np.float32)
    new = host.float32_to_bfloat16_bits(weights)
    return (
        (old, new) if format == "bf16" else (host.quantize_block_fp8(old)[0], host.quantize_block_fp8(new)[0])
    )


def best_seconds(run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The result of `run` and the least processor time it took."""
    result, best = None, float("inf")
    for _ in range(repeats):
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
    return result, best


def xor_zstd_bytes(pairs: Sequence[Pair]) -> int:
    """Byte planes of old XOR new under zstd level 3: what needs no knowledge of the data."""
    compressor = zstandard.ZstdCompressor(level=3)
    return sum(
        len(compressor.compress((old ^ new).view(np.uint8).reshape(-1, old.itemsize).T.tobytes()))
        for old, new in pairs
    )


def arc_bytes(pairs: Sequence[Pair], version: str) -> int | None:
    """Bytes of Fireworks' codec, or None where it is not installed."""
    if importlib.util.find_spec("fireworks_delta_compression") is None:
        return None
    torch = importlib.import_module("torch")
    compress = importlib.import_module("fireworks_delta_compression.compression").delta_compress
    total = 0
    for old, new in pairs:
        dtype = torch.bfloat16 if old.dtype == np.uint16 else torch.float8_e4m3fn
        source, target = (torch.from_numpy(bits.copy()).view(dtype) for bits in (old, new))
        total += compress(src=source, dst=target, compression_format=version)[0].nbytes
    return total


def measure(case: str, pairs: Sequence[Pair], *, format: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of one case, one a preset; several pairs go into one blob."""
    olds = [old for old, _ in pairs]
    size = sum(old.size for old in olds)
    shared = {
        "case": case,
        "format": format,
        "changed_fraction": sum(int(np.count_nonzero(old != new)) for old, new in pairs) / size,
        "entropy_bytes": round(sum(delta.conditional_entropy_bytes(old, new) for old, new in pairs)),
        "xor_zstd_bytes": xor_zstd_bytes(pairs),
        "arc_v2_bytes": arc_bytes(pairs, "arc_v2"),
        "arc_v3_bytes": arc_bytes(pairs, "arc_v3"),
        "bf16_bytes": 2 * size,
        "machine": platform.processor() or platform.machine(),
    }
    rows = []
    for preset in PRESETS:
        blob, encode_seconds = best_seconds(lambda preset=preset: write(pairs, preset), repeats)
        results, decode_seconds = best_seconds(lambda blob=blob: read(blob, olds), repeats)
        for (_, new), result in zip(pairs, results, strict=True):
            np.testing.assert_array_equal(result, new)
        rows.append(
            shared
            | {
                "preset": preset,
                "ours_bytes": len(blob),
                "ours_over_entropy": round(len(blob) / max(shared["entropy_bytes"], 1), 3),
                "encode_gb_s": round(2 * size / 1e9 / encode_seconds, 3),
                "decode_gb_s": round(2 * size / 1e9 / decode_seconds, 3),
            }
        )
    return rows


def write(pairs: Sequence[Pair], preset: str) -> bytes:
    """One blob of all updates."""
    return delta.encode_many([delta.ArrayChange.between(old, new) for old, new in pairs], preset=preset)


def read(blob: bytes, olds: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays after the updates of `write`: decoded and applied to a copy."""
    results = []
    for old, change in zip(olds, delta.decode_many(blob, olds), strict=True):
        if isinstance(change, delta.Dense):
            results.append(change.values)
            continue
        new = old.copy()
        new.reshape(-1)[change.indices] = change.values
        results.append(new)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rms", type=float, nargs="+", default=[1e-7, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for format in FORMATS:
        for rms in options.rms:
            pair = update(options.rows, options.columns, rms=rms, format=format)
            case = f"gaussian {options.rows}x{options.columns} rms {rms:g}"
            for row in measure(case, [pair], format=format, repeats=options.repeats):
                print(json.dumps(row), flush=True)
    for rms in options.rms:
        sizes = [SMALL_ROWS[number % len(SMALL_ROWS)] for number in range(SMALL_MATRICES)]
        pairs = [update(rows, 128, rms=rms, format="fp8", seed=n) for n, rows in enumerate(sizes)]
        case = f"gaussian {SMALL_MATRICES} matrices of 128..512x128 rms {rms:g}"
        for row in measure(case, pairs, format="fp8", repeats=options.repeats):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
