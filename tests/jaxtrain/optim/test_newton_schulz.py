"""Orthogonalisation: a polynomial of the singular values, whatever the order of computation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.optim.newton_schulz import (
    Algorithm,
    Normalization,
    coefficients,
    fastest_dtype,
    floating_point_operations,
    orthogonalize,
)


def _oracle(matrices, polynomials, *, norm=2):
    """U p(...p(s / |s|)) V^T by singular value decomposition in float64; |s| is the `norm`-norm."""
    u, s, vt = np.linalg.svd(np.asarray(matrices, np.float64), full_matrices=False)
    s = s / np.linalg.norm(s, ord=norm, axis=-1, keepdims=True)
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return np.einsum("nir,nr,nrj->nij", u, s, vt)


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize(
    ("count", "rows", "columns"),
    [(3, 6, 9), (2, 9, 6), (1, 8, 8), (11, 66, 72), (1, 513, 520)],
    ids=["wide", "tall", "square", "unrolled in chunks with a rest", "symmetric products by halves"],
)
def test_applies_the_polynomials_to_the_singular_values(algorithm, count, rows, columns):
    matrices = jax.random.normal(jax.random.key(0), (count, rows, columns)) * 1e-3
    polynomials = coefficients("standard", 5)
    found = jax.jit(lambda x: orthogonalize(x, polynomials, algorithm=algorithm))(matrices)
    # A Gram matrix has the condition number squared: what rounds there differs by CPU.
    limit = {Algorithm.direct: 2e-5, Algorithm.gram: 2e-4}[algorithm]
    np.testing.assert_allclose(found, _oracle(matrices, polynomials), atol=limit)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_schatten8_divides_by_the_eighth_power_norm(algorithm):
    matrices = jax.random.normal(jax.random.key(0), (3, 24, 40)) * 1e-3
    polynomials = coefficients("four_steps", 4)
    found = orthogonalize(matrices, polynomials, algorithm=algorithm, normalization="schatten8")
    np.testing.assert_allclose(found, _oracle(matrices, polynomials, norm=8), atol=1e-4)


# Spectra of 256 singular values: those of random matrices, power laws, geometric ones of a given condition
# number, a few large ones over noise.
SPECTRA = {
    "random 256x512": np.linalg.svd(np.random.default_rng(0).normal(size=(256, 512)), compute_uv=False),
    "random 256x256": np.linalg.svd(np.random.default_rng(1).normal(size=(256, 256)), compute_uv=False),
    "power 1": 1 / np.arange(1, 257),
    "power 1/2": np.arange(1, 257) ** -0.5,
    "condition 1e2": np.geomspace(1, 1e-2, 256),
    "condition 1e3": np.geomspace(1, 1e-3, 256),
    "condition 1e4": np.geomspace(1, 1e-4, 256),
    "eight above noise": np.concatenate([np.full(8, 10.0), np.linspace(0.2, 1, 248)]),
    "one above the rest": np.concatenate([[1.0], np.full(255, 1e-2)]),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_four_steps_with_schatten8_are_as_orthogonal_as_five_standard_ones(spectrum):
    """Orthogonality error: root mean square of (singular value - 1). Fewer steps, no larger error."""

    def error(name, steps, norm):
        s = SPECTRA[spectrum] / np.linalg.norm(SPECTRA[spectrum], ord=norm)
        for a, b, c in coefficients(name, steps):
            s = a * s + b * s**3 + c * s**5
        return np.sqrt(np.mean((s - 1) ** 2))

    assert error("four_steps", 4, 8) <= error("standard", 5, 2)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_small_singular_values_stay_bounded(algorithm):
    """A condition number of 1e6, squared by the Gram matrix: still within the polynomial's own bounds."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(32, 32)))[0] for _ in range(2))
    matrix = jnp.asarray((u * np.geomspace(1, 1e-6, 32)) @ v.T, jnp.float32)[None]
    found = orthogonalize(matrix, coefficients("polar_express", 5), algorithm=algorithm)
    np.testing.assert_allclose(found, _oracle(matrix, coefficients("polar_express", 5)), atol=0.02)


@pytest.mark.parametrize("normalization", Normalization)
@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize(("name", "steps"), [("standard", 5), ("polar_express", 5), ("four_steps", 4)])
def test_the_fastest_dtype_leaves_singular_values_where_float32_does(name, steps, algorithm, normalization):
    """Within 0.07 of their range in float32; Muon's stated range [0.7, 1.2] is seven times as wide."""
    matrix = jax.random.normal(jax.random.key(4), (1, 256, 512))
    fastest = fastest_dtype("gpu", algorithm=algorithm, coefficients=name)

    def ends(dtype):
        found = orthogonalize(
            matrix, coefficients(name, steps), algorithm=algorithm, normalization=normalization, dtype=dtype
        )
        values = np.linalg.svd(np.asarray(found[0], np.float64), compute_uv=False)
        return np.array([values.min(), values.max()])

    low, high = ends(fastest) - ends("float32")
    assert low > -0.07
    assert high < 0.07
    if fastest == "float32" and normalization is Normalization.schatten8:  # because bfloat16 does not
        assert ends("bfloat16")[0] < ends("float32")[0] - 0.07


def test_equals_optax():
    matrix = jax.random.normal(jax.random.key(1), (12, 20))
    expected = optax.contrib._muon.orthogonalize_via_newton_schulz(
        matrix, jnp.asarray((3.4445, -4.775, 2.0315))
    )
    found = orthogonalize(matrix[None], coefficients("standard", 5))[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_polar_express_is_closer_to_orthogonal_than_standard():
    """arXiv 2505.16932: every singular value above its lower bound, 1e-3 of the norm, comes near 1."""
    s = np.geomspace(1e-3, 1.0, 1000)

    def worst(name, steps):
        values = s
        for a, b, c in coefficients(name, steps):
            values = a * values + b * values**3 + c * values**5
        return np.max(np.abs(values - 1))

    assert worst("polar_express", 8) < 1e-2
    assert worst("polar_express", 5) < worst("standard", 5)
    assert 0.2 < worst("standard", 10) < 0.4


@pytest.mark.parametrize("normalization", Normalization)
@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_matrix_of_rank_one_keeps_its_direction_and_gains_no_other(algorithm, normalization):
    """Both norms are its one singular value: u v^T times the polynomials at 1, by hand."""
    rng = np.random.default_rng(0)
    u, v = rng.normal(size=(12, 1)), rng.normal(size=(20, 1))
    u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
    polynomials, value = coefficients("standard", 5), 1.0
    for a, b, c in polynomials:
        value = a * value + b * value**3 + c * value**5
    matrix = jnp.asarray(3e-4 * u @ v.T, jnp.float32)[None]
    found = orthogonalize(matrix, polynomials, algorithm=algorithm, normalization=normalization)
    np.testing.assert_allclose(found[0], value * u @ v.T, atol=1e-3)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_converges_to_an_orthogonal_matrix(algorithm):
    """Wide: rows orthonormal. Tall: columns. Eight steps bring all singular values above 1e-3 to 1."""
    matrix = jax.random.normal(jax.random.key(3), (1, 16, 40))
    polynomials = coefficients("polar_express", 8)
    wide = orthogonalize(matrix, polynomials, algorithm=algorithm)[0]
    tall = orthogonalize(matrix.mT, polynomials, algorithm=algorithm)[0]
    np.testing.assert_allclose(wide @ wide.T, np.eye(16), atol=0.02)
    np.testing.assert_allclose(tall, wide.T, atol=1e-4)


@pytest.mark.parametrize("normalization", Normalization)
@pytest.mark.parametrize("algorithm", Algorithm)
def test_zero_matrices_stay_zero(algorithm, normalization):
    how = {"algorithm": algorithm, "normalization": normalization}
    found = orthogonalize(jnp.zeros((2, 4, 6)), coefficients("standard", 5), **how)
    np.testing.assert_array_equal(found, 0.0)
    assert orthogonalize(jnp.zeros((0, 4, 6)), coefficients("standard", 5)).shape == (0, 4, 6)


def test_bfloat16_iterates_in_bfloat16():
    matrices = jax.random.normal(jax.random.key(2), (2, 16, 24))
    found = orthogonalize(matrices, coefficients("standard", 5), dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    # Entries of about 0.2 after 15 products that round to 8 bits, by units that differ by CPU: 0.04 was seen.
    np.testing.assert_allclose(
        found.astype(jnp.float32), _oracle(matrices, coefficients("standard", 5)), atol=0.12
    )


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (512, 256), (128, 128), (513, 640)])
def test_counts_the_operations_of_the_products_that_are_traced(algorithm, rows, columns):
    polynomials = coefficients("standard", 5)
    jaxpr = jax.make_jaxpr(lambda x: orthogonalize(x, polynomials, algorithm=algorithm))(
        jnp.zeros((1, rows, columns))
    )
    expected = floating_point_operations(rows, columns, steps=5, algorithm=algorithm)
    assert set(_dot_operations(jaxpr.jaxpr)) == {expected}


def _dot_operations(jaxpr):
    """Returns operations in each platform's branch: 2 * output size * contracted size per product."""

    def total(jaxpr):
        operations = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                inner = np.prod([shape[axis] for axis in contracted])
                operations += 2 * int(inner) * equation.outvars[0].aval.size
            for value in equation.params.values():
                if hasattr(value, "jaxpr"):
                    operations += total(value.jaxpr)
        return operations

    branches = [e.params["branches"] for e in jaxpr.eqns if e.primitive.name == "cond"]
    return [total(branch.jaxpr) for found in branches for branch in found] or [total(jaxpr)]


def test_wrong_settings_are_refused():
    names = r"\['four_steps', 'polar_express', 'standard'\]"
    with pytest.raises(ValueError, match=f"found 'fast', expected one of {names}"):
        coefficients("fast", 5)
    with pytest.raises(ValueError, match="found 0, expected at least 1"):
        coefficients("standard", 0)
    with pytest.raises(ValueError, match="found 3, expected at least 4, for which 'four_steps' is made"):
        coefficients("four_steps", 3)
