"""Compiles the gradient program of a published model for TPUs that are not here, and prints what it needs.

    PYTHONPATH=<directory with libtpu> python benchmarks/compile_topology.py \
        --model glm4_5_air --topology v5p:4x4x4 --mesh fsdp=4,expert=16 --rows 64 --sequence 4096

Prints one JSON object: bytes of a device's memory (arguments, temporaries), compile seconds, and collectives
by kind and mesh axes. Experts travel nowhere over the expert axis: `expert_gathers` must be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

DUMP = tempfile.mkdtemp(prefix="compile_topology_")
# The text of a program with asynchronous ragged exchanges cannot be read back through jax; the compiler's own
# copy can. Both variables are read when jax starts.
os.environ["XLA_FLAGS"] = (
    f"--xla_dump_to={DUMP} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*accumulate.*"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from jaxtrain.config.model import ModelSection  # noqa: E402
from jaxtrain.data.batch import Batch  # noqa: E402
from jaxtrain.losses.objectives import NEXT_TOKEN_METRICS, next_token  # noqa: E402
from jaxtrain.models.config import ModelConfig  # noqa: E402
from jaxtrain.models.definition import define  # noqa: E402
from jaxtrain.training.step import LossScales  # noqa: E402
from jaxtrain.training.trainer import abstract_state, compile_apply, compile_programs, place  # noqa: E402
from sharding.collectives import collectives, totals  # noqa: E402
from sharding.mesh import MeshSpec  # noqa: E402

VOCABULARY = 151_552  # GLM-4.5's


def main() -> None:
    arguments = parse()
    axes = {name: int(size) for name, _, size in (a.partition("=") for a in arguments.mesh.split(","))}
    mesh = MeshSpec(ici=axes).topology(arguments.topology)
    section = ModelSection.model_validate(
        {"preset": arguments.model, "expert_implementation": "ragged", "remat": arguments.remat}
    )
    hf_config = section.hf_config(vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=0)
    config = ModelConfig.from_hf(hf_config, expert_implementation="ragged", remat=arguments.remat)
    definition, optimizer = define(config), optax.adamw(1.0)
    placement = place(definition, optimizer, mesh)

    def on_devices(shapes, shardings):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    shape = (arguments.rows, arguments.sequence)
    integers = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.rows)
    floats = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placement.rows)
    batch = Batch(
        tokens=integers, targets=integers, loss_weights=floats, segment_ids=integers, positions=integers,
        behavior_logprobs=floats, advantages=floats, temperature=floats, versions=integers,
    )  # fmt: skip
    programs = compile_programs(
        definition, optimizer, placement, loss_function=next_token, metric_names=NEXT_TOKEN_METRICS,
        step=compile_apply(optimizer, placement, clip_norm=1.0),
    )  # fmt: skip
    state = on_devices(abstract_state(definition, optimizer), placement.state)
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=placement.replicated)
    lowered = programs.accumulate.lower(
        state, jax.eval_shape(programs.zero), batch, LossScales(balance=scale, mtp=scale)
    )
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    found = collectives(next(Path(DUMP).glob("*.after_optimizations.txt")).read_text(), mesh)
    local_experts = (
        config.n_routed_experts
        * config.hidden_size
        * config.moe_intermediate_size
        * 2
        // (mesh.shape.get("fsdp", 1) * mesh.shape.get("tensor", 1))
    )
    gathers = [c for c in found if c.kind == "all-gather" and "expert" in c.axes and c.bytes >= local_experts]
    print(
        json.dumps(
            {
                "model": arguments.model,
                "topology": arguments.topology,
                "mesh": axes,
                "batch": shape,
                "compile_s": round(seconds, 1),
                "argument_bytes": memory.argument_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "expert_gathers": len(gathers),
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
        )
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="glm4_5_air", help="a preset of the model section")
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--mesh", default="fsdp=4,expert=16", help="axes and sizes, outermost first")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--remat", default="full", choices=["none", "full", "dots"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
