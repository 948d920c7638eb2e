"""Orthogonalisation of matrices by odd polynomial (Newton-Schulz) iterations.

N matrices in a batch, A rows, B columns, M = min(A, B), K = max(A, B)
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Polynomial = tuple[float, float, float]

# What each named sequence is, and where its numbers come from. A step maps every singular value s to
# a*s + b*s^3 + c*s^5; the last polynomial is repeated when more steps are asked for than are listed.
COEFFICIENTS: dict[str, tuple[Polynomial, ...]] = {
    # Keller Jordan's Muon, also Moonlight (arXiv 2502.16982): ends with singular values in about [0.7, 1.2].
    "standard": ((3.4445, -4.7750, 2.0315),),
    # Polar Express (arXiv 2505.16932, algorithm 1, lower bound 1e-3), each but the last divided by the
    # paper's safety factor 1.01: closer to 1 than "standard" after the same number of steps.
    "polar_express": tuple(
        (a / 1.01, b / 1.01**3, c / 1.01**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        )
    )
    + ((1.875, -1.25, 0.375),),
}

# XLA on a CPU runs independent small products side by side, but a batched one at little more than half the
# speed: matrices are unrolled this many at a time. Below _SMALL the loop costs more than it gains.
_UNROLLED_MATRICES = 8
_SMALL = 64
# Elements (4 bytes each) iterated at once on an accelerator; bounds the iteration's working memory.
_BATCH_ELEMENTS = 2**27


class Algorithm(enum.StrEnum):
    """Two orders of computing the same polynomial of a matrix.

    `direct` iterates on the matrix; `gram` on its M x M Gram matrix, which takes fewer operations the
    more oblong the matrix is (and fewer for a square one from three steps on). `gram` squares the condition
    number, so it always iterates in float32: singular values below about 3e-4 of the norm come out less
    exact.
    """

    direct = "direct"
    gram = "gram"


def coefficients(name: str, steps: int) -> tuple[Polynomial, ...]:
    """Returns one polynomial a step from the sequence called `name`.

    Raises:
      ValueError: unknown name, or fewer than one step.
    """
    if name not in COEFFICIENTS:
        raise ValueError(
            f"Newton-Schulz coefficients: found {name!r}, expected one of {sorted(COEFFICIENTS)}"
        )
    if steps < 1:
        raise ValueError(f"Newton-Schulz steps: found {steps}, expected at least 1")
    listed = COEFFICIENTS[name]
    return tuple(listed[min(step, len(listed) - 1)] for step in range(steps))


def floating_point_operations(rows: int, columns: int, *, steps: int, algorithm: Algorithm) -> int:
    """Returns multiplications plus additions in the matrix products that orthogonalise one matrix."""
    m, k = sorted((rows, columns))
    gram_product, square = 2 * m * m * k, 2 * m**3
    if Algorithm(algorithm) is Algorithm.direct:
        return steps * (2 * gram_product + square)
    # r @ r each step; r @ z and p @ z between steps; q @ z on all but the first; the two outer products.
    return steps * square + (steps - 1) * 3 * square + 2 * gram_product


def orthogonalize(
    x_NAB: Float[Array, "N A B"],
    polynomials: tuple[Polynomial, ...],
    *,
    algorithm: Algorithm = Algorithm.direct,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "N A B"]:
    """Applies the polynomials to the singular values of each matrix, after dividing it by its Frobenius norm.

    Returns matrices in `dtype`, the dtype of the products (sums are float32 on accelerators too). A zero
    matrix stays zero. float32 means float32 on every platform, not the faster reduced forms of TF32 or BF16
    passes.
    Source: https://kellerjordan.github.io/posts/muon/.
    """
    dtype = jnp.dtype(dtype)
    iterate = {Algorithm.direct: _direct, Algorithm.gram: _gram}[Algorithm(algorithm)]

    def one(x: Array) -> Array:
        norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
        x = (x.astype(jnp.float32) / jnp.maximum(norm, 1e-7)).astype(dtype)
        wide = x.shape[-2] <= x.shape[-1]
        y = iterate(x if wide else x.mT, polynomials)
        return (y if wide else y.mT).astype(dtype)

    def unrolled(x: Array) -> Array:
        return jnp.stack([one(x[i]) for i in range(x.shape[0])])

    count, rows, columns = x_NAB.shape
    if count == 0:
        return x_NAB.astype(dtype)
    batch = max(1, _BATCH_ELEMENTS // (rows * columns))
    if min(rows, columns) <= _SMALL:
        return _in_chunks(one, x_NAB, batch)
    return jax.lax.platform_dependent(
        x_NAB,
        cpu=lambda x: _in_chunks(unrolled, x, _UNROLLED_MATRICES),
        default=lambda x: _in_chunks(one, x, batch),
    )


def gram_product(x_NMK: Float[Array, "N M K"]) -> Float[Array, "N M M"]:
    """Returns x @ x.T of each matrix in float32, whatever the dtype of x."""
    return _matmul(x_NMK, x_NMK.mT, sum_dtype=jnp.float32)


def polynomial_factor(
    gram_NMM: Float[Array, "N M M"], polynomials: tuple[Polynomial, ...]
) -> Float[Array, "N M M"]:
    """Returns q such that q @ x has the polynomials applied to the singular values of x; gram is x @ x.T.

    `gram` is float32, of matrices of Frobenius norm at most 1. Every factor is a polynomial of it, so all
    commute: x after n steps is q_n @ x, and its Gram matrix z_n @ r_n @ z_n.
    """
    r_NMM = gram_NMM
    (a, b, c), *rest = polynomials
    z_NMM = b * r_NMM + c * _matmul(r_NMM, r_NMM)  # without its a * identity, which costs no product
    q_NMM = a * jnp.eye(r_NMM.shape[-1], dtype=r_NMM.dtype) + z_NMM
    for next_a, next_b, next_c in rest:
        p_NMM = a * r_NMM + _matmul(r_NMM, z_NMM)
        r_NMM = a * p_NMM + _matmul(p_NMM, z_NMM)
        a, b, c = next_a, next_b, next_c
        z_NMM = b * r_NMM + c * _matmul(r_NMM, r_NMM)
        q_NMM = a * q_NMM + _matmul(q_NMM, z_NMM)
    return q_NMM


def scaled_by_factor(q_NMM: Float[Array, "N M M"], x_NMK: Float[Array, "N M K"]) -> Float[Array, "N M K"]:
    """Returns q @ x in float32, multiplied in the dtype of x."""
    return _matmul(q_NMM.astype(x_NMK.dtype), x_NMK, sum_dtype=jnp.float32)


def _matmul(x: Array, y: Array, *, sum_dtype: jax.typing.DTypeLike | None = None) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, y, precision=precision, preferred_element_type=sum_dtype)


def _direct(x_MK: Array, polynomials: tuple[Polynomial, ...]) -> Array:
    for a, b, c in polynomials:
        gram_MM = _matmul(x_MK, x_MK.mT)
        x_MK = a * x_MK + _matmul(b * gram_MM + c * _matmul(gram_MM, gram_MM), x_MK)
    return x_MK


def _gram(x_MK: Array, polynomials: tuple[Polynomial, ...]) -> Array:
    return scaled_by_factor(polynomial_factor(gram_product(x_MK), polynomials), x_MK)


def _in_chunks(function: Callable[[Array], Array], x_N: Array, limit: int) -> Array:
    """Applies a batched function to at most `limit` items of the leading axis at a time."""
    count = x_N.shape[0]
    if count <= limit:
        return function(x_N)
    whole = count - count % limit
    chunks = x_N[:whole].reshape(whole // limit, limit, *x_N.shape[1:])
    y = jax.lax.map(function, chunks).reshape(x_N[:whole].shape)
    return y if whole == count else jnp.concatenate([y, function(x_N[whole:])])
