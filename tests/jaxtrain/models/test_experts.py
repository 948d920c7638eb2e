"""Routed experts: every implementation equals each token's own products, in value and in every gradient."""

# N tokens, D model, E experts, F expert hidden, k experts a token

from __future__ import annotations

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
