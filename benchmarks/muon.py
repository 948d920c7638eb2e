"""What a Muon update costs, against optax's, against AdamW, and against the machine's own matrix products.

    python benchmarks/muon.py [--repeats 5] [--shape experts|quickstart|both]
    python benchmarks/muon.py --topology v5p:4x4x4 [--preset glm-4.5-air --layers 4]

The first prints, for 64 matrices of 512x256 and for the model of configs/quickstart.yaml:

    update_ms              one update and its application, best of the repetitions
    ratio_vs_optax_muon    optax.contrib.muon over the preset with less arithmetic (`MuonConfig` below), whose
                           orthogonality error is no larger (tests/jaxtrain/optim/test_newton_schulz.py)
    ratio_same_arithmetic  optax.contrib.muon over ours with the same coefficients, steps and order
    matmul_fraction        Newton-Schulz operations of `ours` over the whole update's time, as a fraction of
                           the rate of one large product on the same machine in the same rounds
    matmul_fractions       the same of every program with the same polynomial, always counting the operations
                           of the direct order; and the time of the iteration's own small products alone over
                           that of `ours` (`ours_of_own_products`)
    flops_ratio_ideal      operations of the busiest of 8 devices in the compiled program over whole matrices
                           dealt out evenly, and `collectives` of that program; by layout
    step_share             the update's part of a training step
    scale                  the same by arithmetic for GLM-4.5 (`muon_cost.step_share`)

Programs run in turn within each round, so that other work on the machine falls on all alike; processor time
is given beside wall time, for a machine that is not idle. The second compiles the update of a model's
parameters ahead of time for a TPU (needs libtpu, no TPU) and prints the same bound for each group.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from muon_cost import step_share, work

from jaxtrain.commands.large_pages import use_large_pages
from jaxtrain.config.load import load_config
from jaxtrain.config.model import ModelSection
from jaxtrain.data.batch import Batch
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.next_token import NextToken
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import Definition, define, initialize
from jaxtrain.models.flops import training_flops
from jaxtrain.optim import newton_schulz
from jaxtrain.optim.muon import MatrixLayout, MuonConfig, layout_of, scale_by_muon
from jaxtrain.optim.newton_schulz import Algorithm, Normalization
from jaxtrain.optim.optimizer import Method, OptimizerConfig, build, muon_layouts
from jaxtrain.training.state import TrainState, sharded_shapes
from jaxtrain.training.step import LossScales, accumulate, zero_sums
from sharding.collectives import collectives, totals
from sharding.mesh import MeshSpec

QUICKSTART = Path(__file__).parents[1] / "configs/quickstart.yaml"
EXPERTS = {"moe/mlp/experts/gate_proj": (64, 512, 256)}
PEAK_SIZES = (1024, 2048)
LESS_ARITHMETIC = MuonConfig(
    algorithm=Algorithm.gram,
    coefficients="four_steps",
    normalization=Normalization.schatten8,
    newton_schulz_steps=4,
)
PRESETS = {
    "ours": MuonConfig(),
    "ours_gram": MuonConfig(algorithm=Algorithm.gram),
    "ours_less_arithmetic": LESS_ARITHMETIC,
}


def optimizers(params: Mapping[str, jax.Array]) -> dict[str, optax.GradientTransformation]:
    """Returns what is compared, all at learning rate 1 with a weight decay of 0.1."""
    taken = muon_layouts(OptimizerConfig(), params)
    dimensions = {
        path: optax.contrib.MuonDimensionNumbers(-2, -1) if path in taken else None for path in params
    }
    return {
        **{name: build(OptimizerConfig(muon=config), params) for name, config in PRESETS.items()},
        "optax_muon": optax.contrib.muon(
            1.0, consistent_rms=0.2, weight_decay=0.1, muon_weight_dimension_numbers=lambda _: dimensions
        ),
        "adamw": build(OptimizerConfig(matrices=Method.adamw, lm_head=Method.adamw), params),
    }


def update_program(optimizer: optax.GradientTransformation, params: Any, gradients: Any) -> Callable[[], Any]:
    """Returns a step that donates parameters and state, as training does. Each call continues the last."""

    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, u: p + 1e-3 * u, params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    carried = [jax.tree.map(jnp.copy, params), jax.jit(optimizer.init)(params)]

    def run() -> Any:
        carried[:] = compiled(*carried, gradients)
        return carried

    return run


def peak_programs() -> dict[str, tuple[Callable[[], Any], int]]:
    """Returns large square products: a program and its operations each."""
    multiply = jax.jit(jnp.matmul)
    found: dict[str, tuple[Callable[[], Any], int]] = {}
    for size in PEAK_SIZES:
        square = jnp.ones((size, size)) / size
        found[f"product_{size}"] = (lambda square=square: multiply(square, square)), 2 * size**3
    return found


def own_products(params: Mapping[str, jax.Array]) -> dict[str, Callable[[], Any]]:
    """Returns the products of one direct step of every matrix, by kind, without what is between them."""
    found: dict[str, Callable[[], Any]] = {}
    for layout in muon_layouts(OptimizerConfig(), params).values():
        m, k = sorted(layout.matrix)
        x, square = jnp.ones((m, k)) / k, jnp.ones((m, m)) / m
        for kind, left, right in (("x @ x.T", x, x.T), ("a @ a", square, square), ("b @ x", square, x)):
            lefts = [left + i * 1e-6 for i in range(layout.count)]
            multiply = jax.jit(lambda lefts, right: [left @ right for left in lefts])
            found[f"{kind} {m} {k}"] = lambda f=multiply, a=lefts, b=right: f(a, b)
    return found


def best_seconds(
    programs: Mapping[str, Callable[[], Any]], *, repeats: int
) -> dict[str, tuple[float, float]]:
    """Runs all once a round after a round to compile; returns the best wall and processor time of each."""
    best = {name: (math.inf, math.inf) for name in programs}
    for round_number in range(repeats + 1):
        for name, program in programs.items():
            wall, processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(program())
            spent = time.perf_counter() - wall, time.process_time() - processor
            if round_number:
                best[name] = (min(best[name][0], spent[0]), min(best[name][1], spent[1]))
    return best


def measure(
    params: Mapping[str, jax.Array], others: Mapping[str, Callable[[], Any]], *, repeats: int
) -> dict[str, Any]:
    """Returns the measurements; `others` are timed along and come out in `other_ms`."""
    rng = np.random.default_rng(1)
    gradients = {
        path: jnp.asarray(rng.normal(size=p.shape) * 1e-3, jnp.float32) for path, p in params.items()
    }
    updates = {name: update_program(tx, params, gradients) for name, tx in optimizers(params).items()}
    peaks, products = peak_programs(), own_products(params) if len(params) == 1 else {}
    large = {name: program for name, (program, _) in peaks.items()}
    seconds = best_seconds({**updates, **others, **products, **large}, repeats=repeats)
    operations = {
        name: sum(
            group.operations for group in work(config, muon_layouts(OptimizerConfig(muon=config), params))
        )
        for name, config in PRESETS.items()
    }
    operations["optax_muon"] = operations["ours"]

    def rates(clock: int) -> dict[str, float]:
        return {name: flops / seconds[name][clock] / 1e9 for name, flops in operations.items()}

    def peak(clock: int) -> float:
        return max(flops / seconds[name][clock] / 1e9 for name, (_, flops) in peaks.items())

    def fractions(clock: int) -> dict[str, float]:
        same = {
            name: operations["ours"] / seconds[name][clock] for name in ("ours", "ours_gram", "optax_muon")
        }
        fraction = {name: rate / 1e9 / peak(clock) for name, rate in same.items()}
        if products:
            alone = 5 * sum(seconds[name][clock] for name in products)
            fraction["ours_of_own_products"] = alone / seconds["ours"][clock]
        return fraction

    def ratio(name: str, clock: int = 0) -> float:
        return seconds["optax_muon"][clock] / seconds[name][clock]

    return {
        "update_ms": {name: 1e3 * seconds[name][0] for name in updates},
        "ratio_vs_optax_muon": ratio("ours_less_arithmetic"),
        "ratio_same_arithmetic": ratio("ours"),
        "matmul_fraction": rates(0)["ours"] / peak(0),
        "matmul_fractions": fractions(0),
        "gflop": {name: flops / 1e9 for name, flops in operations.items()},
        "gflop_per_s": rates(0),
        "peak_gflop_per_s": peak(0),
        "other_ms": {name: 1e3 * seconds[name][0] for name in others},
        "by_processor_time": {
            "update_ms": {name: 1e3 * seconds[name][1] for name in updates},
            "ratio_vs_optax_muon": ratio("ours_less_arithmetic", 1),
            "ratio_same_arithmetic": ratio("ours", 1),
            "matmul_fraction": rates(1)["ours"] / peak(1),
            "matmul_fractions": fractions(1),
        },
    }


def measure_experts(*, repeats: int) -> dict[str, Any]:
    """64 experts, of which a token visits 8."""
    rng = np.random.default_rng(0)
    params = {p: jnp.asarray(rng.normal(size=shape) * 0.02, jnp.float32) for p, shape in EXPERTS.items()}
    found = measure(params, {}, repeats=repeats)
    size = sum(p.size for p in params.values())
    update = found["update_ms"]["ours"] / 1e3
    shares = {}
    for tokens in (65_536, 1_048_576):
        model = 6 * size * tokens * 8 / 64 / found["peak_gflop_per_s"] / 1e9
        shares[f"{tokens} tokens, 8 of 64 experts, model at the rate of a large product"] = update / (
            update + model
        )
    return {"shape": EXPERTS} | found | {"step_share": shares} | sharded_in_another_process()


def measure_quickstart(*, repeats: int) -> dict[str, Any]:
    """The model that `make quickstart` trains, with a microbatch of its size; two of them make a batch."""
    config = load_config(QUICKSTART, ())
    definition = define(ModelConfig.of(config.model.decoder(vocab_size=64), **config.model.numerics))
    values = initialize(definition.config, seed=0)
    params = {path: value for path, value in values.items() if path not in definition.buffers}
    found = measure(params, {"microbatch": microbatch_program(definition, values, config)}, repeats=repeats)
    update, microbatch = found["update_ms"]["ours"], found["other_ms"]["microbatch"]
    share = update / (update + 2 * microbatch)
    matrices = sum(layout.count for layout in muon_layouts(OptimizerConfig(), params).values())
    return {"matrices": matrices} | found | {"step_share": {"8192 tokens, measured": share}}


def microbatch_program(definition: Definition, values: Any, config: Any) -> Callable[[], Any]:
    """Forward and backward of one full microbatch of the configuration's shape."""
    rows, length = config.batch.rows, config.batch.sequence_length
    rng = np.random.default_rng(0)
    documents = [
        Document(
            tokens=rng.integers(0, 64, length).astype(np.int32), loss_weights=np.ones(length, np.float32)
        )
        for _ in range(rows)
    ]
    batch: Batch = next(iter(pack(documents, rows=rows, sequence_length=length).microbatches()))
    params = {path: value for path, value in values.items() if path not in definition.buffers}
    buffers = {path: values[path] for path in definition.buffers}
    state = TrainState(params, {}, buffers, optax.EmptyState())
    scales = LossScales(balance=np.float32(1e-4), mtp=np.float32(0))
    zero = jax.jit(lambda: zero_sums(definition, params, ("entropy",)))()
    add = jax.jit(lambda state, sums, batch: accumulate(definition, NextToken(), state, sums, batch, scales))
    return lambda: add(state, zero, batch)


def bound(config: MuonConfig, layouts: Mapping[str, MatrixLayout]) -> dict[str, Any]:
    """Compiles one group's update and returns its operations a device, the optimum, and its collectives.

    Compiled without the loop that bounds working memory, because XLA's own count takes a loop's body once.
    """
    newton_schulz._BATCH_ELEMENTS = newton_schulz._UNROLLED_MATRICES = 2**62
    structs = {
        path: jax.ShapeDtypeStruct(layout.shape, jnp.float32, sharding=layout.sharding)
        for path, layout in layouts.items()
    }
    transform = scale_by_muon(config, layouts)
    state = jax.tree.map(
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
        jax.eval_shape(transform.init, structs).momentum,
        structs,
    )
    state = type(jax.eval_shape(transform.init, structs))(state)
    compiled = jax.jit(transform.update).lower(structs, state).compile()
    (group,) = work(config, layouts)
    found = totals(collectives(compiled))
    _, new_state = compiled.output_shardings
    as_parameters = all(
        new_state.momentum[path].is_equivalent_to(layout.sharding, len(layout.shape))
        for path, layout in layouts.items()
    )
    return {
        "matrices": [group.matrices, *group.matrix],
        "flops_ratio_ideal": compiled.cost_analysis()["flops"] / group.optimum,
        "flops_ratio_ideal_counted": group.busiest / group.optimum,
        "collectives": {f"{one.kind} over {'+'.join(one.axes)}": one.count for one in found},
        "state_sharded_as_parameters": as_parameters,
    }


def sharded() -> dict[str, Any]:
    """The bound on 8 simulated devices, expert x fsdp x tensor = 2 x 2 x 2."""
    mesh = MeshSpec(ici={"expert": 2, "fsdp": 2, "tensor": 2}).build()
    cases = {
        "experts, layers first": ((1, 64, 512, 256), (None, "expert", "fsdp", "tensor")),
        "15 layers that do not divide": ((15, 512, 256), (None, ("expert", "fsdp"), "tensor")),
        "one output head": ((512, 4096), ("fsdp", ("expert", "tensor"))),
    }
    found = {}
    for name, (shape, spec) in cases.items():
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        found[name] = bound(MuonConfig(), {"w": layout_of(x)})
    return found


def sharded_in_another_process() -> dict[str, Any]:
    """`sharded` where jax sees 8 devices; timings are taken where it sees one."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, __file__, "--sharded"]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, check=True, capture_output=True, timeout=600
    )
    cases = json.loads(done.stdout)
    return {
        key: {name: case[key] for name, case in cases.items()} for key in ("flops_ratio_ideal", "collectives")
    }


def topology(name: str, *, preset: str, layers: int) -> dict[str, Any]:
    """The bound of every group of a model with `layers` layers, on compile-only devices; BF16 iteration."""
    section = {"preset": preset, "num_hidden_layers": layers}
    definition = define(ModelConfig.of(ModelSection.model_validate(section).decoder(vocab_size=151_552)))
    mesh = MeshSpec(ici={"fsdp": -1, "expert": 4, "tensor": 4}).topology(name)
    config = MuonConfig(iteration_dtype="bfloat16")
    layouts = muon_layouts(OptimizerConfig(muon=config), sharded_shapes(definition, mesh))
    found = {}
    for group in work(config, layouts):
        found[", ".join(group.paths)] = bound(config, {path: layouts[path] for path in group.paths})
        print(
            json.dumps({", ".join(group.paths): found[", ".join(group.paths)]}), file=sys.stderr, flush=True
        )
    return {"topology": name, "mesh": dict(mesh.shape), "preset": preset, "layers": layers, "groups": found}


def scale() -> dict[str, dict[str, float]]:
    """Muon's part of the operations of a step of GLM-4.5, by preset and by devices x tokens a device."""
    definition = define(
        ModelConfig.of(ModelSection.model_validate({"preset": "glm-4.5"}).decoder(vocab_size=151_552))
    )
    params = {path: leaf for path, leaf in definition.shapes.items() if path not in definition.buffers}
    flops = training_flops(definition).at_length(4096)
    return {
        name: {
            f"{devices} devices x {tokens} tokens": step_share(
                OptimizerConfig(muon=config),
                params,
                flops_per_token=flops,
                tokens_per_device=tokens,
                devices=devices,
            ).share
            for devices, tokens in ((256, 4096), (256, 65_536), (4096, 4096))
        }
        for name, config in PRESETS.items()
    }


def main() -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=("experts", "quickstart", "both"), default="both")
    parser.add_argument("--sharded", action="store_true", help="only the bound, on the devices that jax sees")
    parser.add_argument("--topology", help="only the bound, for absent TPUs, for instance v5p:4x4x4")
    parser.add_argument("--preset", default="glm-4.5-air", help="model of --topology")
    parser.add_argument("--layers", type=int, default=4, help="its number of layers")
    given = parser.parse_args()
    if given.sharded:
        print(json.dumps(sharded()))
        return
    if given.topology:
        print(json.dumps(topology(given.topology, preset=given.preset, layers=given.layers), indent=1))
        return
    machine = {"platform": jax.default_backend(), "cores": os.cpu_count(), "jax": jax.__version__}
    found: dict[str, Any] = {"benchmark": "muon", "machine": machine | {"cpu": platform.processor()}}
    if given.shape in ("experts", "both"):
        found |= measure_experts(repeats=given.repeats)
    if given.shape in ("quickstart", "both"):
        found["quickstart"] = measure_quickstart(repeats=given.repeats)
    print(json.dumps(found | {"scale": scale()}, indent=1))


if __name__ == "__main__":
    use_large_pages()  # as `jaxtrain train` does
    main()
