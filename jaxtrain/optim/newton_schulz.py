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
    # The same construction (algorithm 1 there) for exactly four steps from a lower bound of 3.5e-3: every
    # singular value above that bound ends within 0.16 of 1 (0.17 with the safety factor).
    "four_steps": (
        *(
            (a / 1.01, b / 1.01**3, c / 1.01**5)
            for a, b, c in (
                (8.362274829226735, -24.681426968106567, 18.289885235184116),
                (4.010366821620289, -2.988205942693535, 0.5668675495000812),
                (3.413050493516874, -2.558673111124993, 0.5180040329686083),
            )
        ),
        (2.389310819443815, -1.7473798097685567, 0.42732537017130195),
    ),
}
# Sequences that leave singular values far from 1 if they are cut off.
_WHOLE = ("four_steps",)

# XLA on a CPU runs independent small products side by side, but a batched one at little more than half the
# speed: matrices are unrolled this many at a time. Below _SMALL the loop costs more than it gains.
_UNROLLED_MATRICES = 8
_SMALL = 64
# From this many rows on a symmetric product is computed by halves: below, the smaller products are slower.
_HALVED = 512
# Elements (4 bytes each) iterated at once on an accelerator; bounds the iteration's working memory.
_BATCH_ELEMENTS = 2**27


class Algorithm(enum.StrEnum):
    """Two orders of computing the same polynomial of a matrix.

    `direct` iterates on the matrix; `gram` on its M x M Gram matrix, which takes fewer operations the
    more oblong the matrix is (and fewer for a square one from three steps on). `gram` squares the condition
    number, so it always iterates in float32: singular values below about 3e-4 of the norm are less
    exact.
    """

    direct = "direct"
    gram = "gram"


class Normalization(enum.StrEnum):
    """The divisor of a matrix that makes every singular value at most 1: a bound on the largest one.

    `frobenius` is the root of their sum of squares; `schatten8` the eighth root of the sum of their eighth
    powers, which is closer to the largest (0.15 instead of 1 times the Frobenius norm for a random
    256 x 512 matrix) and needs no product beyond the first step's. Singular values then start closer to 1.
    """

    frobenius = "frobenius"
    schatten8 = "schatten8"


def coefficients(name: str, steps: int) -> tuple[Polynomial, ...]:
    """Returns one polynomial a step from the sequence called `name`.

    Raises:
      ValueError: unknown name, fewer than one step, or a sequence cut off before its end.
    """
    if name not in COEFFICIENTS:
        raise ValueError(
            f"Newton-Schulz coefficients: found {name!r}, expected one of {sorted(COEFFICIENTS)}"
        )
    if steps < 1:
        raise ValueError(f"Newton-Schulz steps: found {steps}, expected at least 1")
    listed = COEFFICIENTS[name]
    if name in _WHOLE and steps < len(listed):
        raise ValueError(
            f"Newton-Schulz steps: found {steps}, expected at least {len(listed)}, for which {name!r} is made"
        )
    return tuple(listed[min(step, len(listed) - 1)] for step in range(steps))


def fastest_dtype(platform: str, *, algorithm: Algorithm, coefficients: str) -> str:
    """Returns the dtype of the fastest products of a platform in which matrices stay as orthogonal.

    In bfloat16 singular values end at most 0.07 outside their range in float32, but "four_steps" by the
    `direct` algorithm leaves some near 0.5 after the `schatten8` norm, for which it is made.
    """
    inexact = coefficients == "four_steps" and algorithm is Algorithm.direct
    return "float32" if platform == "cpu" or inexact else "bfloat16"


def floating_point_operations(rows: int, columns: int, *, steps: int, algorithm: Algorithm) -> int:
    """Returns multiplications plus additions in the matrix products that orthogonalise one matrix."""
    m, k = sorted((rows, columns))
    outer = 2 * m * m * k
    if Algorithm(algorithm) is Algorithm.direct:
        return undivided_operations(m, steps=steps, algorithm=algorithm) + steps * (
            _symmetric_operations(m, k) + outer
        )
    return undivided_operations(m, steps=steps, algorithm=algorithm) + _symmetric_operations(m, k) + outer


def undivided_operations(m: int, *, steps: int, algorithm: Algorithm) -> int:
    """Returns those among M x M matrices alone, which cutting the long side over devices does not divide."""
    if Algorithm(algorithm) is Algorithm.direct:
        return steps * _symmetric_operations(m, m)
    # r @ r each step; between steps r @ z, p @ z and q @ z.
    return (steps + 3 * (steps - 1)) * _symmetric_operations(m, m)


def _symmetric_operations(m: int, k: int) -> int:
    half = m // 2 if m >= _HALVED else 0
    return 2 * m * m * k - 2 * (m - half) * half * k


def orthogonalize(
    x_NAB: Float[Array, "N A B"],
    polynomials: tuple[Polynomial, ...],
    *,
    algorithm: Algorithm = Algorithm.direct,
    normalization: Normalization = Normalization.frobenius,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "N A B"]:
    """Applies the polynomials to the singular values of each matrix, after dividing it by its norm.

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
        y = iterate(x if wide else x.mT, polynomials, Normalization(normalization))
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
    return _symmetric_product(x_NMK, x_NMK.mT, sum_dtype=jnp.float32)


def polynomial_factor(
    gram_NMM: Float[Array, "N M M"],
    polynomials: tuple[Polynomial, ...],
    normalization: Normalization = Normalization.frobenius,
) -> Float[Array, "N M M"]:
    """Returns q such that q @ x has the polynomials applied to the singular values of x; gram is x @ x.T.

    `gram` is float32, of matrices of Frobenius norm at most 1. Every factor is a polynomial of it, so all
    commute and every product is symmetric: x after n steps is q_n @ x, and its Gram matrix z_n @ r_n @ z_n.
    """
    r_NMM = gram_NMM
    square_NMM = _symmetric_product(r_NMM, r_NMM)
    bound = 1.0
    if normalization is Normalization.schatten8:
        bound = _schatten8(square_NMM)
        r_NMM, square_NMM = r_NMM / bound**2, square_NMM / bound**4
    (a, b, c), *rest = polynomials
    z_NMM = b * r_NMM + c * square_NMM  # without its a * identity, which costs no product
    q_NMM = a * jnp.eye(r_NMM.shape[-1], dtype=r_NMM.dtype) + z_NMM
    for next_a, next_b, next_c in rest:
        p_NMM = a * r_NMM + _symmetric_product(r_NMM, z_NMM)
        r_NMM = a * p_NMM + _symmetric_product(p_NMM, z_NMM)
        a, b, c = next_a, next_b, next_c
        z_NMM = b * r_NMM + c * _symmetric_product(r_NMM, r_NMM)
        q_NMM = a * q_NMM + _symmetric_product(q_NMM, z_NMM)
    return q_NMM if normalization is Normalization.frobenius else q_NMM / bound


def step_factor(
    gram_NMM: Float[Array, "N M M"], polynomial: Polynomial, normalization: Normalization
) -> Float[Array, "N M M"]:
    """Returns q such that q @ x has one polynomial applied to its singular values; gram is x @ x.T.

    A whole factor costs one pass over M x M matrices, where a * x + ... would cost one over x.
    """
    a, b, c = polynomial
    square_NMM = _symmetric_product(gram_NMM, gram_NMM)
    identity_MM = jnp.eye(gram_NMM.shape[-1], dtype=gram_NMM.dtype)
    if normalization is Normalization.frobenius:
        return a * identity_MM + b * gram_NMM + c * square_NMM
    bound = _schatten8(square_NMM)
    q_NMM = a * identity_MM + (b / bound**2) * gram_NMM + (c / bound**4) * square_NMM
    return (q_NMM / bound).astype(gram_NMM.dtype)


def scaled_by_factor(q_NMM: Float[Array, "N M M"], x_NMK: Float[Array, "N M K"]) -> Float[Array, "N M K"]:
    """Returns q @ x in float32, multiplied in the dtype of x."""
    return _matmul(q_NMM.astype(x_NMK.dtype), x_NMK, sum_dtype=jnp.float32)


def _matmul(x: Array, y: Array, *, sum_dtype: jax.typing.DTypeLike | None = None) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, y, precision=precision, preferred_element_type=sum_dtype)


def _symmetric_product(x: Array, y: Array, *, sum_dtype: jax.typing.DTypeLike | None = None) -> Array:
    """x @ y where that is symmetric: the lower left quarter of a large one is copied, not multiplied."""
    m = x.shape[-2]
    if m < _HALVED:
        return _matmul(x, y, sum_dtype=sum_dtype)
    half = m - m // 2
    top = _matmul(x[..., :half, :], y, sum_dtype=sum_dtype)
    bottom_right = _matmul(x[..., half:, :], y[..., half:], sum_dtype=sum_dtype)
    bottom = jnp.concatenate([top[..., half:].mT, bottom_right], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def _schatten8(gram_square_NMM: Array) -> Array:
    """Bound [N, 1, 1] on the largest singular value, from the square of the Gram matrix."""
    norm = jnp.linalg.norm(gram_square_NMM.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    return jnp.maximum(norm, 1e-28) ** 0.25


def _direct(x_MK: Array, polynomials: tuple[Polynomial, ...], normalization: Normalization) -> Array:
    for step, polynomial in enumerate(polynomials):
        gram_MM = _symmetric_product(x_MK, x_MK.mT)
        q_MM = step_factor(gram_MM, polynomial, normalization if step == 0 else Normalization.frobenius)
        x_MK = _matmul(q_MM.astype(x_MK.dtype), x_MK)
    return x_MK


def _gram(x_MK: Array, polynomials: tuple[Polynomial, ...], normalization: Normalization) -> Array:
    return scaled_by_factor(polynomial_factor(gram_product(x_MK), polynomials, normalization), x_MK)


def _in_chunks(function: Callable[[Array], Array], x_N: Array, limit: int) -> Array:
    """Applies a batched function to at most `limit` items of the leading axis at a time."""
    count = x_N.shape[0]
    if count <= limit:
        return function(x_N)
    whole = count - count % limit
    chunks = x_N[:whole].reshape(whole // limit, limit, *x_N.shape[1:])
    y = jax.lax.map(function, chunks).reshape(x_N[:whole].shape)
    return y if whole == count else jnp.concatenate([y, function(x_N[whole:])])
