"""Muon's work on a mesh: at most 1.1 times whole matrices dealt out evenly, in the compiled program."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.muon_cost import step_share, work
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.flops import training_flops
from jaxtrain.optim.muon import MuonConfig, layout_of, scale_by_muon
from jaxtrain.optim.newton_schulz import Algorithm
from jaxtrain.optim.optimizer import OptimizerConfig
from tests.jaxtrain.models.tiny import HF_CONFIG

# What a decoder has, on expert x fsdp x tensor = 2 x 2 x 2: [layers, experts, in, out] and [layers, in, out].
LAYOUTS = {
    "experts over their axis": ((3, 8, 72, 80), P(None, "expert", "fsdp", "tensor")),
    "experts over two axes": ((2, 8, 72, 80), P(None, ("expert", "fsdp"), None, "tensor")),
    "layers that do not divide": ((15, 72, 80), P(None, "fsdp", "tensor")),
    "cut by tensor alone": ((9, 72, 80), P(None, None, "tensor")),
    "rows cut by all axes": ((16, 80, 72), P(None, ("expert", "fsdp", "tensor"), None)),
    "one output head": ((72, 320), P("fsdp", ("expert", "tensor"))),
}

REPLICATED = ("layers that do not divide", "cut by tensor alone")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("expert", "fsdp", "tensor"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_compiled_program_does_whole_matrices_dealt_out_evenly(mesh, name):
    """Operations of the products in the compiled program of one device, and what it communicates."""
    shape, spec = LAYOUTS[name]
    config = MuonConfig()
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    transform = scale_by_muon(config, {"w": layout_of(x)})
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=x.sharding),
        jax.eval_shape(transform.init, {"w": x}),
    )
    compiled = jax.jit(transform.update).lower({"w": x}, state).compile()
    text = compiled.as_text()
    (expected,) = work(config, {"w": layout_of(x)})
    found = _product_operations(text)
    assert found == pytest.approx(expected.busiest, rel=0.01)
    assert found <= 1.1 * expected.optimum
    directions, new_state = compiled.output_shardings
    assert directions["w"].is_equivalent_to(x.sharding, x.ndim)
    assert new_state.momentum["w"].is_equivalent_to(x.sharding, x.ndim)
    kinds = re.findall(r" (all-to-all|all-gather|reduce-scatter|collective-permute)\(", text)
    assert kinds.count("all-to-all") <= 2
    # Devices that hold the same blocks share out the work and gather the directions, not the parameters.
    assert kinds.count("all-gather") == int(name in REPLICATED)
    assert set(kinds) <= {"all-to-all", "all-gather"}


def _product_operations(text: str) -> int:
    """2 * output size * contracted size of each dot, times the trips of the loop it is in."""
    bodies = {
        body: int(trips) for body, trips in re.findall(r"body=%([\w.\-]+).*?known_trip_count\D+(\d+)", text)
    }
    operations, trips = 0, 1
    shapes: dict[str, list[int]] = {}
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.\-]+) \(", line):
            trips = bodies.get(header[1], 1)
        if not (defined := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = \w+\[([\d,]*)\]", line)):
            continue
        shapes[defined[1]] = [int(n) for n in defined[2].split(",") if n]
        if dot := re.search(
            r" dot\((?:\w+\[[\d,]*\]\S* )?%([\w.\-]+), .*lhs_contracting_dims=\{(\d+)\}", line
        ):
            inner = shapes[dot[1]][int(dot[2])]
            operations += trips * 2 * inner * int(np.prod(shapes[defined[1]]))
    return operations


@pytest.mark.parametrize("algorithm", Algorithm)
def test_share_of_a_step_by_hand(algorithm):
    """One device takes everything: operations of every matrix but the embedding, over 6 N a token."""
    definition = define(ModelConfig.from_hf(HF_CONFIG))
    params = {p: s for p, s in definition.shapes.items() if p not in definition.buffers}
    config = OptimizerConfig(muon=MuonConfig(algorithm=algorithm))
    flops = training_flops(definition).at_length(16)
    alone = step_share(config, params, flops_per_token=flops, tokens_per_device=1000, devices=1)
    layouts = {p: layout_of(s) for p, s in params.items() if p.endswith("kernel") or "/experts/" in p}
    assert alone.muon == sum(group.operations for group in work(config.muon, layouts))
    assert alone.share == pytest.approx(alone.muon / (alone.muon + 1000 * flops))
    many = step_share(config, params, flops_per_token=flops, tokens_per_device=1000, devices=4)
    assert alone.muon / 4 <= many.muon < alone.muon
