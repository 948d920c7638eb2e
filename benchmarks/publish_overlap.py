"""How much publishing every step slows the trainer of `make quickstart` down.

    python benchmarks/publish_overlap.py [--config configs/quickstart.yaml --tokens 8192 --rounds 8 --steps 4]
        [--trainer-cores 1]

The trainer of an `async_grpo` config (its model, optimizer, policy loss and mesh) takes steps on one batch of
random tokens as large as the config's at the end of its ramp. Rounds of `--steps` steps take turns: one
without publication, one that publishes after every step to a store on disk, both in one process. On a CPU the
encoder takes its cores from the training step; on an accelerator only the quantisation and the comparison run
beside it. `--trainer-cores N` makes a CPU resemble that: the training step, quantisation included, has the
first N cores and the threads that publish the others, so that what is left is what an accelerator's host has
too: the interpreter that both share, the program that quantises, memory bandwidth. Prints one JSON object:

    step_ms_alone, step_ms_publishing   medians of a step, the call of `publish` included
    slowdown                            their ratio less 1
    step_cpu_ms                         processor time of all threads a step without publication, mean
    publication_cpu_ms                  what a step that publishes needs beside it; processor_slowdown: its
                                        part of step_cpu_ms, for a machine that is not idle
    publish_call_ms                     what `publish` itself holds the trainer up, median
    publish_ms                          in the background, to the moved head, median of the rounds' last
    overtaken                           how many publications a newer one replaced, of `publications`
    delta_bytes, reference_bytes, changed_fraction, tensors, parameters, tokens, cores, load
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np

from jaxtrain.config.load import load_config
from jaxtrain.config.references import build
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.batch import Batch
from jaxtrain.publishing.publication import open_publishing
from jaxtrain.training.phase import scheduled_values
from jaxtrain.training.programs import train_step
from jaxtrain.training.run import open_run
from rollout_bridge.store import Store

WARM_STEPS = 4  # a full version and two changes: everything is compiled


def random_batch(config: AsyncGrpoConfig, vocabulary: int, tokens: int) -> Batch:
    """Whole rows of answers to nothing: every position is trained on, half of them pushed up."""
    rows, length = config.batch.rows, config.batch.sequence_length
    shape = (max(1, tokens // (rows * length)), rows, length)
    random = np.random.default_rng(0)
    drawn = random.integers(0, vocabulary, (*shape[:2], length + 1), np.int32)
    return Batch(
        {
            "tokens": drawn[..., :-1],
            "targets": drawn[..., 1:],
            "loss_weights": np.ones(shape, np.float32),
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
            "behavior_logprobs": np.full(shape, -np.log(vocabulary), np.float32),
            "advantages": np.broadcast_to(random.choice([-1.0, 1.0], (*shape[:2], 1)), shape).astype("f4"),
            "temperature": np.ones(shape, np.float32),
        }
    )


def pin_publisher(cores: set[int]) -> None:
    """Moves the threads that publish to `cores`; those they start later are born there."""
    for thread in threading.enumerate():
        if thread.name.startswith(("publish", "encode")) and thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, cores)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quickstart = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    parser.add_argument("--config", type=Path, default=quickstart)
    parser.add_argument("--tokens", type=int, help="of a step; the end of the config's ramp by default")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trainer-cores", type=int, help="cores of the step; the others publish")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[arguments.trainer_cores :]) if arguments.trainer_cores else set()
    if others:
        os.sched_setaffinity(0, set(cores) - others)  # before there is a backend: its threads inherit it
    wall: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    calls, background, publications = [], [], 0
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        config = load_config(arguments.config, [f"store=file://{directory}/store"])
        assert isinstance(config, AsyncGrpoConfig), "a config with rollouts publishes"
        run = stack.enter_context(open_run(config, Path(directory) / "run"))
        publisher = stack.enter_context(open_publishing(run, Store.open(config.store_url))).publisher
        rows, length = config.batch.rows, config.batch.sequence_length
        programs = run.trainable.programs(
            build("loss", config.rl.loss, where="rl.loss"), rows=rows, sequence_length=length
        )
        tokens: int = arguments.tokens or config.rl.batch.end_tokens or rows * length
        batch = random_batch(config, run.trainable.definition.config.vocab_size, tokens)
        values = scheduled_values(config.rl)(10 * tokens * WARM_STEPS)
        state, _ = run.restore_or_initialize()
        number = 0
        for turn in range(-1, 2 * arguments.rounds):
            publishing, publication = turn % 2 == 1, None
            if others:
                pin_publisher(others)
            for _ in range(WARM_STEPS if turn < 0 else arguments.steps):
                number += 1
                began, worked = time.perf_counter(), time.process_time()
                state, _ = train_step(programs, run.trainable.placement, state, batch, values)
                if publishing or turn < 0:
                    called = time.perf_counter()
                    publication = publisher.publish(state.model, step=number)
                    if turn < 0:
                        publication.result()
                        continue
                    calls.append(1e3 * (time.perf_counter() - called))
                    publications += 1
                wall[publishing].append(1e3 * (time.perf_counter() - began))
                processor[publishing].append(1e3 * (time.process_time() - worked))
            if turn >= 0 and publication is not None:
                worked = time.process_time()  # the last one ends after its step: its work counts all the same
                publication.result()
                processor[True][-1] += 1e3 * (time.process_time() - worked)
                background.append(publisher.counters["publish_milliseconds"])
        assert publisher.last is not None
        manifest, counters = publisher.last, dict(publisher.counters)
    alone, beside = statistics.median(wall[False]), statistics.median(wall[True])
    own, both = statistics.fmean(processor[False]), statistics.fmean(processor[True])
    print(
        json.dumps(
            {
                "benchmark": "publish_overlap",
                "step_ms_alone": alone,
                "step_ms_publishing": beside,
                "slowdown": beside / alone - 1,
                "step_cpu_ms": own,
                "publication_cpu_ms": both - own,
                "processor_slowdown": both / own - 1,
                "publish_call_ms": statistics.median(calls),
                "publish_ms": statistics.median(background),
                "publications": publications,
                "overtaken": counters.get("overtaken", 0),
                "delta_bytes": manifest.stats.delta_bytes,
                "reference_bytes": manifest.stats.reference_bytes,
                "changed_fraction": manifest.stats.changed_fraction,
                "tensors": len(manifest.tensors),
                "parameters": manifest.stats.full_bytes_bf16 // 2,
                "tokens": int(batch.tokens.size),
                "cores": len(cores),
                "trainer_cores": len(cores) - len(others),
                "niceness": publisher.settings.niceness,
                "load": os.getloadavg()[0],
                "machine": f"{platform.machine()} {jax.devices()[0].device_kind}",
                "jax": jax.__version__,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
