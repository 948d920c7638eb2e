"""What the steps of a real run changed of what it published, by kind of layer.

    python benchmarks/published_sparsity.py RUN [RUN ...]

RUN is a run's directory. A subscriber replays its chain, every digest checked, and each version is compared
with the one before. Prints one JSON row for each version and kind of layer, FP8 codes and BF16 values apart,
and one for all (`kind` "all"): `values`, `changed_fraction`, `ours_bytes` (the codec's preset small, the kind
in one blob), `entropy_bytes` (as in benchmarks/delta.py) and `tiny_fraction`: of the changes in BF16, the
share whose old value is below 1e-4. Weights that a quantised checkpoint left at zero are such, and change in
every step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from delta import Pair, entropy_bytes, write  # benchmarks/delta.py
from update_sparsity import kind_of

from rollout_bridge.store import Store
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.subscriber import Subscriber

TINY = 1e-4
FORMATS = {1: "fp8", 2: "bf16", 4: "f32"}  # by bytes of a value; scales are float32


def steps(run: Path) -> Iterator[tuple[int, dict[str, Pair]]]:
    """Each version after the first, with (old, new) bits of every tensor."""
    with tempfile.TemporaryDirectory() as folder:
        mirror = Mirror(folder)
        subscriber = Subscriber(Store.open(str(run / "store")), mirror)
        latest = subscriber.latest()
        if latest is None or latest.version < 2:
            raise SystemExit(f"{run / 'store'}: holds fewer than two versions; let the run publish more")
        before: dict[str, np.ndarray] = {}
        for version in range(1, latest.version + 1):
            subscriber.advance(version)
            now = {name: mirror.tensor(name).copy() for name in mirror.view.specs}
            if before:
                yield version, {name: (before[name], bits) for name, bits in now.items()}
            before = now
        mirror.close()


def row(pairs: list[Pair]) -> dict[str, Any]:
    """The numbers of one kind."""
    values = sum(old.size for old, _ in pairs)
    changed = sum(int(np.count_nonzero(old != new)) for old, new in pairs)
    wide = [(old, old != new) for old, new in pairs if old.dtype == np.uint16]
    tiny = sum(
        int(np.count_nonzero(np.abs((old[mask].astype(np.uint32) << 16).view(np.float32)) < TINY))
        for old, mask in wide
    )
    of = sum(int(np.count_nonzero(mask)) for _, mask in wide)
    return {
        "values": values,
        "changed_fraction": changed / values,
        "ours_bytes": len(write(pairs, "small")),
        "entropy_bytes": round(entropy_bytes(pairs)),
        "tiny_fraction": tiny / of if of else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    for run in parser.parse_args().runs:
        for version, pairs in steps(run):
            kinds: dict[tuple[str, str], list[Pair]] = defaultdict(list)
            for name, pair in pairs.items():
                kind = "scales" if name.endswith("_scale_inv") else kind_of(name)
                kinds[kind, FORMATS[pair[0].itemsize]].append(pair)
                kinds["all", "all"].append(pair)
            for (kind, form), found in sorted(kinds.items()):
                print(
                    json.dumps(
                        {"run": run.name, "version": version, "kind": kind, "format": form} | row(found)
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
