"""Compiles the training step of a published model for TPUs that are not here, and prints what it needs.

    pip install --target DIRECTORY --no-deps libtpu    # jax.version's requirement of jax[tpu]
    PYTHONPATH=.:DIRECTORY python benchmarks/compile_topology.py \
        --model glm4_5_355b --topology v5p:8x8x4 --mesh fsdp=8,expert=32 --rows 256 --sequence 4096

One JSON object a program (`accumulate`: forward and gradient of a microbatch; `apply`: the step with Muon):
compile seconds, bytes of a device's memory, and collectives by kind and mesh axes. `peak_bytes`, in which
the optimizer's state counts although `accumulate` does not read it, must fit into `memory_bytes`. Three
numbers must be 0: `over_memory_bytes`, `rematerialised` (arrays that the partitioner could only get from
one layout to another by giving all of it to every device), and `expert_gathers` of `accumulate`
(all-gathers over the expert axis of an expert matrix or more: experts travel nowhere). The step does gather
over that axis: directions of the matrices which it repeats, those of attention.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

DUMP = tempfile.mkdtemp(prefix="compile_topology_")
# The text of a program with asynchronous ragged exchanges cannot be read back through jax; the compiler's own
# copy can. All variables are read when jax starts.
os.environ["XLA_FLAGS"] = (
    f"--xla_dump_to={DUMP} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*(accumulate|apply).*"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["TPU_STDERR_LOG_LEVEL"] = "1"  # warnings

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jaxtrain.config.model import ModelSection  # noqa: E402
from jaxtrain.data.batch import Batch, microbatch_shapes  # noqa: E402
from jaxtrain.losses.next_token import NextToken  # noqa: E402
from jaxtrain.models.config import ModelConfig  # noqa: E402
from jaxtrain.optim.muon import MuonConfig  # noqa: E402
from jaxtrain.optim.optimizer import OptimizerConfig  # noqa: E402
from jaxtrain.training.build import trainable  # noqa: E402
from jaxtrain.training.step import LossScales, StepInputs  # noqa: E402
from sharding.collectives import collectives, totals  # noqa: E402
from sharding.mesh import MeshSpec  # noqa: E402

VOCABULARY = 151_552  # GLM-4.5's
# Of a chip, by the first part of a topology's name; a core of v5p and later addresses all of it.
MEMORY_BYTES = {"v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30, "tpu7x": 192 * 2**30}
REMATERIALISED = "Involuntary full rematerialization"


def main() -> None:
    arguments = parse()
    axes = {name: int(size) for name, _, size in (a.partition("=") for a in arguments.mesh.split(","))}
    mesh = MeshSpec(ici=axes).topology(arguments.topology)
    section = ModelSection.model_validate(
        {"preset": arguments.model, "expert_implementation": "ragged", "remat": arguments.remat}
    )
    hf_config = section.hf_config(vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=0)
    config = ModelConfig.from_hf(hf_config, expert_implementation="ragged", remat=arguments.remat)
    common = {
        "model": arguments.model,
        "topology": arguments.topology,
        "mesh": axes,
        "batch": [arguments.rows, arguments.sequence],
    }
    for name, lowered, unread in lower(arguments, config, mesh):
        if name in arguments.programs.split(","):
            found = measure(name, lowered, config, mesh, arguments, unread_bytes=unread)
            print(json.dumps(common | {"program": name} | found), flush=True)


def lower(
    arguments: argparse.Namespace, config: ModelConfig, mesh: Mesh
) -> Iterator[tuple[str, jax.stages.Lowered, int]]:
    """Both programs by name, lowered when asked for, and the bytes of a device's state left unread."""
    muon = MuonConfig(iteration_dtype="bfloat16", momentum_dtype=arguments.momentum_dtype)
    built = trainable(config, mesh, OptimizerConfig(muon=muon), clip_norm=1.0)
    placement = built.placement
    state: Any = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        built.abstract,
        placement.state,
    )
    loss, shape = NextToken(), {"rows": arguments.rows, "sequence_length": arguments.sequence}
    columns: Any = {
        name: jax.ShapeDtypeStruct(column.shape, column.dtype, sharding=placement.rows)
        for name, column in microbatch_shapes(loss.columns, **shape).items()
    }
    scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=placement.replicated)
    programs = built.programs(loss, **shape)
    sums: Any = jax.eval_shape(programs.zero)
    yield (
        "accumulate",
        programs.accumulate.lower(state, sums, Batch(columns), LossScales(balance=scalar, mtp=scalar)),
        sum(held_bytes(leaf) for leaf in jax.tree.leaves(state.optimizer)),
    )
    inputs = StepInputs(learning_rate=scalar, router_bias_rate=scalar)
    yield "apply", programs.apply.lower(state, replace(sums, metrics={}, noise=None), inputs), 0


def held_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Of one device."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def measure(
    name: str,
    lowered: jax.stages.Lowered,
    config: ModelConfig,
    mesh: Mesh,
    arguments: argparse.Namespace,
    *,
    unread_bytes: int,
) -> dict[str, Any]:
    """Compiles; seconds are of this process, which may share its cores."""
    wall, processor = time.perf_counter(), time.process_time()
    with compiler_messages() as messages:
        compiled = lowered.compile()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    (text,) = Path(DUMP).glob(f"*{name}*.after_optimizations.txt")
    found = collectives(text.read_text(), mesh)
    one_expert = 2 * config.hidden_size * config.moe_intermediate_size // mesh.shape.get("tensor", 1)
    gathers = [c for c in found if c.kind == "all-gather" and "expert" in c.axes and c.bytes >= one_expert]
    memory = compiled.memory_analysis()
    assert memory is not None, "this compiler reports no memory"
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + unread_bytes
    )
    available = MEMORY_BYTES[arguments.topology.partition(":")[0]]
    return {
        "compile_s": round(wall, 1),
        "compile_processor_s": round(processor, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": peak,
        "memory_bytes": available,
        "over_memory_bytes": max(0, peak - available),
        **({"expert_gathers": len(gathers)} if name == "accumulate" else {}),
        "rematerialised": sum(REMATERIALISED in line for line in messages),
        "collectives": [
            {
                "kind": t.kind,
                "axes": t.axes,
                "count": t.count,
                "runs": t.executions,
                "runs_known": t.complete,
                "wire_bytes": t.wire_bytes,
            }
            for t in totals(found)
        ],
    }


@contextmanager
def compiler_messages() -> Iterator[list[str]]:
    """Lines that are written to standard error inside, complete afterwards; shown if an exception leaves."""
    lines: list[str] = []
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        except BaseException:
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            os.write(real, file.read())
            raise
        finally:
            os.dup2(real, 2)
            os.close(real)
            file.seek(0)
            lines.extend(file.read().decode(errors="replace").splitlines())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="glm4_5_air", help="a preset of the model section")
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--mesh", default="fsdp=4,expert=16", help="axes and sizes, outermost first")
    parser.add_argument("--programs", default="accumulate,apply", help="one or both of them")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--remat", default="full", choices=["none", "full", "dots"])
    parser.add_argument("--momentum-dtype", default="float32", choices=["float32", "bfloat16"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
