"""What bringing a mirror to the next version costs, by stage, with one decoding process and with several.

    python benchmarks/weight_sync_decode.py [--decoders 1 2] [--rms 1e-6] [--preset fast] [--versions 3]
        [--experts 6] [--layers 2] [--hidden 5120] [--intermediate 1536] [--directory /dev/shm]

A model of GLM-4.5's expert matrices (1536x5120, block FP8; 215M parameters by default; `--layers 92
--experts 160 --hidden 128 --intermediate 128` has GLM-4.5's number of tensors) is published in
`--versions` deltas; a subscriber and mirror for each number of processes take them in turn, each after the
other. Prints one JSON object. `seconds` of a delta, by processes and stage, medians:

    decode    fetched (from `--directory`), decoded, digests checked, journalled and synced
    apply     the journal read back and checked, the bits set, mirror and version synced
    verify    changed tensors digested once more from the mirror (up to 64 MB)
    advance   all of it

speedup: of `decode` and `advance`, of the most processes over the fewest. parent_s: processor seconds of the
process that hands out the work, with the most processes, by stage. hand_out: milliseconds of wall time for a
batch of 64 MB, as large models have them, fetched, checked and sent to processes that do nothing with it:
what bounds decoding on many cores. gb_s: BF16 bytes of the model a second. full_advance: a new reader's
first, of the full version (processes start in it). peak_mb: of one delta, by processes, as the subscriber's
Python and numpy allocate.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rollout_bridge import architectures
from rollout_bridge.architectures.tensors import paths, stacked_shape
from rollout_bridge.quantization.plan import plan_for
from rollout_bridge.store import Store
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.blobs import Blobs
from rollout_bridge.weights.format.chain import Link, read_manifest
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.read import subscriber
from rollout_bridge.weights.read.decoding import Folding
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import TENSORS
from rollout_bridge.weights.read.parts import JournalPart
from rollout_bridge.weights.read.subscriber import Subscriber
from rollout_bridge.weights.write.publisher import Publisher, WriterSettings


def config(*, layers: int, experts: int, hidden: int, intermediate: int) -> dict[str, Any]:
    """GLM-4.5's kind of layers, the first one dense."""
    return {
        "model_type": "glm4_moe",
        "vocab_size": 2048,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "use_qk_norm": True,
        "attention_bias": True,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 1.0,
    }


class Stages:
    """Seconds of the stages of one update, taken where one ends and the next begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        Mirror._redo_journal = self._timed("apply", Mirror._redo_journal)
        Subscriber._verify_bytes_of = self._timed("verify", Subscriber._verify_bytes_of)

    def _timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began, worked = time.perf_counter(), time.process_time()
            try:
                return work(*arguments)
            finally:
                self.seconds[stage] += time.perf_counter() - began
                self.seconds[f"{stage}_parent"] += time.process_time() - worked

        return timed

    def of(self, subscriber: Subscriber) -> dict[str, float]:
        """Seconds of the next update of `subscriber`."""
        self.seconds.clear()
        assert self._timed("advance", subscriber.advance)() is not None
        for of in ("", "_parent"):
            rest = self.seconds[f"apply{of}"] + self.seconds[f"verify{of}"]
            self.seconds[f"decode{of}"] = self.seconds[f"advance{of}"] - rest
        return dict(self.seconds)


def last_link(reader: Subscriber) -> Link:
    """The version that the mirror holds, as the change it came by."""
    ref = reader.mirror.view.state.ref
    return Link(ref, read_manifest(reader.store, ref, reader.join()), whole=False)


def nothing(folding: Folding) -> JournalPart:
    return JournalPart(folding.path, "")


def hand_out(reader: Subscriber, links: list[Link], batches: int = 400) -> dict[str, float]:
    """Wall time of handing out batches of `links`' tensors, over and over, objects fetched anew each time."""
    view = reader.mirror.view
    places = subscriber._places(view, [name for name in view.specs if links[-1].pieces(name)])
    tensors = 0

    def foldings() -> Iterator[Folding]:
        nonlocal tensors
        number = 0
        while number < batches:
            blobs = Blobs(reader.store)
            for batch in reader._batches_of(view.directory / TENSORS, places, links, blobs):
                number += 1
                tensors += len(batch.places)
                yield Folding(batch, view.directory / f"journal-{number}.part")
            blobs.close()

    size, subscriber._BATCH_BYTES = subscriber._BATCH_BYTES, 1 << 26
    began = time.perf_counter()
    done = sum(
        1
        for _ in reader._workers.in_order(
            nothing, foldings(), here=False, cost=lambda folding: 0, limit=1 << 40
        )
    )
    seconds = time.perf_counter() - began
    subscriber._BATCH_BYTES = size
    return {"ms": 1e3 * seconds / done, "tensors_a_batch": tensors / done}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decoders", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rms", type=float, default=1e-6)
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    hf_config = config(
        layers=options.layers,
        experts=options.experts,
        hidden=options.hidden,
        intermediate=options.intermediate,
    )
    run = RunInfo.new(hf_config, plan_for(architectures.tensors(hf_config), serving=None))
    random = np.random.default_rng(0)
    params = {
        path: 0.02 * random.standard_normal(stacked_shape(group), np.float32)
        for path, group in paths(run.sources).items()
    }
    stages = Stages()
    seconds: dict[int, list[dict[str, float]]] = defaultdict(list)
    full: dict[int, float] = {}
    peak: dict[int, int] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        store = Store.open(f"{directory}/store")
        runs.create_or_join(store, run)
        settings = WriterSettings(preset=options.preset)
        publisher = Publisher(store, run=run, full_every=1 << 20, settings=settings)
        publisher.take_over()
        readers = {
            count: Subscriber(
                store,
                Mirror(f"{directory}/{count}"),
                name=f"of-{count}",
                decoders=count,
                inline_bytes=1 << 20,
            )
            for count in options.decoders
        }
        for version in range(1, 3 + options.versions):
            if version > 1:
                for array in params.values():
                    array += options.rms * random.standard_normal(array.shape, np.float32)
            tree = {path: jax.numpy.array(array) for path, array in params.items()}
            manifest = publisher.publish(tree, step=version).result(600)
            for count, reader in readers.items():
                if version == 2:  # memory only: following it slows everything down
                    tracemalloc.start()
                    reader.advance()
                    peak[count] = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                    continue
                found = stages.of(reader)
                if version == 1:
                    full[count] = found["advance"]
                else:
                    seconds[count].append(found)
        last = readers[max(readers)]
        handed_out = hand_out(last, [last_link(last)]) if max(readers) > 1 else None
        bits = [
            {name: reader.mirror.tensor(name) for name in reader.mirror.view.specs}
            for reader in readers.values()
        ]
        same = all(np.array_equal(bits[0][name], other[name]) for other in bits for name in bits[0])
        publisher.close()
        for reader in readers.values():
            reader.close()
    medians = {
        count: {stage: statistics.median(each[stage] for each in found) for stage in found[0]}
        for count, found in seconds.items()
    }
    fewest, most = min(medians), max(medians)
    speedup = {stage: medians[fewest][stage] / medians[most][stage] for stage in ("decode", "advance")}
    bf16_bytes = manifest.stats.full_bytes_bf16
    print(
        json.dumps(
            {
                "benchmark": "weight_sync_decode",
                "seconds": medians,
                "speedup": speedup,
                "parent_s": {
                    stage: medians[most][f"{stage}_parent"] for stage in ("decode", "apply", "verify")
                },
                "hand_out": handed_out,
                "gb_s": {
                    count: {stage: bf16_bytes / 1e9 / of[stage] for stage in ("decode", "advance")}
                    for count, of in medians.items()
                },
                "full_advance": full,
                "peak_mb": {count: value / 1e6 for count, value in peak.items()},
                "same_bits": same,
                "parameters": bf16_bytes // 2,
                "tensors": len(manifest.tensors),
                "update_rms": options.rms,
                "preset": options.preset,
                "changed_fraction": manifest.stats.changed_fraction,
                "delta_bytes": manifest.stats.delta_bytes,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "load": os.getloadavg()[0],
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
