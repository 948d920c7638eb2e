"""Routed experts: every implementation equals each token's own products, in value and in every gradient."""

# N tokens, D model, E experts, F expert hidden, k experts a token

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.config import ExpertImplementation
from jaxtrain.models.experts import routed_experts

N, D, E, F, K = 700, 16, 5, 24, 2  # rows of one expert fill windows of three sizes


def _routing(kind: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(N)]).astype(np.int32)
    match kind:
        case "one expert":
            ids[:, 0], ids[:, 1] = 3, E
        case "some of nobody":
            ids[rng.random((N, K)) < 0.7] = E
        case "all of nobody":
            ids[:] = E
    return ids


def _values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    shapes = {"x": (N, D), "weights": (N, K), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _definition(values: dict[str, jax.Array], ids_Nk: jax.Array) -> jax.Array:
    """Each (token, choice) with a copy of its expert's weights, zeros for nobody."""
    gate, up, down = (
        jnp.take(values[name], ids_Nk, axis=0, mode="fill", fill_value=0) for name in ("gate", "up", "down")
    )
    hidden = jax.nn.silu(jnp.einsum("ND,NkDF->NkF", values["x"], gate))
    hidden = hidden * jnp.einsum("ND,NkDF->NkF", values["x"], up)
    return jnp.einsum("NkF,NkFD,Nk->ND", hidden, down, values["weights"])


@pytest.mark.parametrize("kind", ["random", "one expert", "some of nobody", "all of nobody"])
def test_every_implementation_equals_each_tokens_own_products(kind):
    ids, values = jnp.asarray(_routing(kind)), _values()
    probe = np.random.default_rng(9).standard_normal((N, D)).astype(np.float32)

    def graded(function):
        def loss(values):
            out = function(values)
            return (out * probe).sum(), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(values)
        return {"out": out, **gradients}

    expected = graded(lambda v: _definition(v, ids))
    for implementation in ExpertImplementation:
        actual = graded(
            lambda v, implementation=implementation: routed_experts(
                v["x"], ids, v["weights"], (v["gate"], v["up"], v["down"]), implementation=implementation
            )
        )
        for name, value in expected.items():
            scale = max(float(jnp.abs(value).max()), 1.0)
            np.testing.assert_allclose(
                actual[name], value, rtol=1e-4, atol=1e-5 * scale, err_msg=f"{implementation}: {name}"
            )


def _products(program: str) -> list[int]:
    """Operations of each matrix product in the text of a lowered program."""
    shape = r"tensor<([\dx]+)x\w+>"
    pattern = rf"dot_general .*contracting_dims = \[([\d, ]*)\] x .*: \({shape}, {shape}\) -> {shape}"
    found = []
    for contracted, left, _, out in re.findall(pattern, program):
        sizes = [int(size) for size in left.split("x")]
        inner = math.prod(sizes[int(axis)] for axis in contracted.split(",") if axis)
        found.append(2 * inner * math.prod(int(size) for size in out.split("x")))
    return found


@pytest.mark.parametrize(("implementation", "least", "most"), [("auto", 1, 1.5), ("dense", 16, 20)])
def test_the_program_for_a_gpu_has_no_product_of_every_token_with_every_expert(implementation, least, most):
    """Nine products of chosen pairs, with gradients, and a quarter of padding; dense: E / k = 16."""
    tokens, width, hidden, experts, k = 4096, 64, 48, 32, 2
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    kernels = (shape(experts, width, hidden),) * 2 + (shape(experts, hidden, width),)

    def loss(x, weights, kernels, ids):
        way = ExpertImplementation(implementation)
        out = routed_experts(x, ids, weights, kernels, implementation=way, platform="gpu")
        return (out.astype(jnp.float32) ** 2).sum()

    arguments = (
        shape(tokens, width),
        shape(tokens, k),
        kernels,
        jax.ShapeDtypeStruct((tokens, k), jnp.int32),
    )
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).trace(*arguments)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_dot" not in text  # XLA for CUDA pads every group to all rows
    needed = 9 * 2 * tokens * k * width * hidden
    assert least <= sum(_products(text)) / needed <= most
