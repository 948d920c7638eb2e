"""What a Muon update costs, against optax's, against AdamW, and against the machine's own matrix products.

    python benchmarks/muon.py [--matrices 64 --rows 512 --columns 256 --repeats 5]

Prints JSON. Programs are timed in turn within each round and the best of the rounds is kept, so that other
work on the machine falls on all of them alike. `matmul_fraction` is the arithmetic of the iteration over the
whole update's time, as a fraction of the rate that the same machine reaches on the iteration's own products
alone, each at its shape; `matmul_fractions` has it for every program, and `matmul_fractions_of_peak`
against the rate of one large square product. `step_share` is the update's part of a training step of so many
tokens through the same matrices, forward and backward at that peak rate.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.muon import MuonConfig
from jaxtrain.optim.newton_schulz import Algorithm, floating_point_operations
from jaxtrain.optim.optimizer import Method, OptimizerConfig, build

PATH = "moe/mlp/experts/gate_proj"
PEAK_SIZE = 1024
PRESETS = {
    "ours": MuonConfig(),
    "ours_gram": MuonConfig(algorithm=Algorithm.gram),
    "ours_less_arithmetic": MuonConfig(
        algorithm=Algorithm.gram, coefficients="polar_express", newton_schulz_steps=4
    ),
}


def optimizers(params: Mapping[str, jax.Array]) -> dict[str, optax.GradientTransformation]:
    """Returns what is compared, all at learning rate 1 with a weight decay of 0.1."""
    dimensions = {path: optax.contrib.MuonDimensionNumbers(-2, -1) for path in params}
    return {
        **{name: build(OptimizerConfig(muon=config), params) for name, config in PRESETS.items()},
        "optax_muon": optax.contrib.muon(
            1.0, consistent_rms=0.2, weight_decay=0.1, muon_weight_dimension_numbers=lambda _: dimensions
        ),
        "adamw": build(OptimizerConfig(matrices=Method.adamw), params),
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


def product_programs(matrices: int, rows: int, columns: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Returns, by product of the iteration: a program and its operations."""
    m, k = sorted((rows, columns))
    x, square = jnp.ones((m, k)) / k, jnp.ones((m, m)) / m
    products = {"x @ x.T": (x, x.T), "a @ a": (square, square), "b @ x": (square, x)}

    def program(left: jax.Array, right: jax.Array) -> tuple[Callable[[], Any], int]:
        lefts = [left + i * 1e-6 for i in range(matrices)]
        compiled = jax.jit(lambda lefts, right: [left @ right for left in lefts])
        operations = matrices * 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return (lambda: compiled(lefts, right)), operations

    found = {name: program(*pair) for name, pair in products.items()}
    big = jnp.ones((PEAK_SIZE, PEAK_SIZE)) / PEAK_SIZE
    multiply = jax.jit(jnp.matmul)
    found["peak"] = (lambda: multiply(big, big)), 2 * PEAK_SIZE**3
    return found


def best_seconds(programs: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, float]:
    """Runs all programs once a round and returns the best time of each over the rounds."""
    best = {name: float("inf") for name in programs}
    for _ in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            elapsed = time.perf_counter() - start
            best[name] = min(best[name], elapsed)
    return best


def measure(*, matrices: int, rows: int, columns: int, repeats: int) -> dict[str, Any]:
    """Returns the measurements, times in milliseconds and rates in GFLOP/s."""
    keys = jax.random.split(jax.random.key(0))
    params = {PATH: 0.02 * jax.random.normal(keys[0], (matrices, rows, columns))}
    gradients = {PATH: 1e-3 * jax.random.normal(keys[1], (matrices, rows, columns))}
    products = product_programs(matrices, rows, columns)
    updates = {name: update_program(tx, params, gradients) for name, tx in optimizers(params).items()}
    seconds = best_seconds(
        {**updates, **{name: program for name, (program, _) in products.items()}}, repeats=repeats
    )

    def operations(name: str) -> int:
        config = PRESETS.get(name, PRESETS["ours"])
        steps, algorithm = config.newton_schulz_steps, config.algorithm
        return matrices * floating_point_operations(rows, columns, steps=steps, algorithm=algorithm)

    size = matrices * rows * columns
    rates = {name: flops / seconds[name] / 1e9 for name, (_, flops) in products.items()}
    m, k = sorted((rows, columns))
    one_step = {"x @ x.T": 2 * m * m * k, "a @ a": 2 * m**3, "b @ x": 2 * m * m * k}
    products_only = matrices * 5 * sum(flops / rates[name] / 1e9 for name, flops in one_step.items())
    muons = [*PRESETS, "optax_muon"]
    own_rate = operations("ours") / products_only / 1e9
    return {
        "benchmark": "muon",
        "machine": {"platform": jax.default_backend(), "cpu": platform.processor(), "jax": jax.__version__},
        "matrices": [matrices, rows, columns],
        "update_ms": {name: 1e3 * seconds[name] for name in updates},
        "ratio_vs_optax_muon": seconds["optax_muon"] / min(seconds[name] for name in PRESETS),
        "ratio_same_arithmetic": seconds["optax_muon"] / seconds["ours"],
        "ratio_same_polynomial": seconds["optax_muon"] / seconds["ours_gram"],
        "ratio_vs_adamw": seconds["ours"] / seconds["adamw"],
        "gflop": {name: operations(name) / 1e9 for name in muons},
        "gflop_per_s": {name: operations(name) / seconds[name] / 1e9 for name in muons},
        "product_gflop_per_s": rates | {"iteration": own_rate},
        "matmul_fraction": operations("ours") / seconds["ours"] / 1e9 / own_rate,
        "matmul_fractions": {name: operations(name) / seconds[name] / 1e9 / own_rate for name in muons},
        "matmul_fractions_of_peak": {
            name: operations(name) / seconds[name] / 1e9 / rates["peak"] for name in muons
        },
        "step_share": {
            str(tokens): seconds["ours"] / (seconds["ours"] + 6 * size * tokens / rates["peak"] / 1e9)
            for tokens in (16_384, 1_048_576)
        },
        "flops_ratio_ideal": operations("ours") / operations("ours_less_arithmetic"),
    }


def main() -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--matrices", type=int, default=64)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
