"""The JAX twins against the host, bit for bit, and change extraction against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rollout_bridge.delta import classes
from rollout_bridge.quantization import device, host

SHAPE = (2, 130, 257)
quantize = jax.jit(device.quantize_block_fp8)
dequantize = jax.jit(device.dequantize_block_fp8)
diff = jax.jit(device.diff_compact, static_argnames="max_changes")
rank = jax.jit(device.class_ranks, static_argnames="start")


def _every_kind_of_weight(seed: int, lowest: int, highest: int) -> np.ndarray:
    """BF16 bits with exponent fields between the bounds, of any sign and mantissa, zeros, subnormals."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(lowest, highest + 1, SHAPE)
    bits = rng.integers(0, 2, SHAPE) << 15 | exponent << 7 | rng.integers(0, 128, SHAPE)
    bits[rng.random(SHAPE) < 0.1] &= 0x807F
    bits[rng.random(SHAPE) < 0.1] &= 0x8000
    return bits.astype(np.uint16)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 254), st.integers(0, 254))
def test_device_and_host_agree_bit_for_bit(seed: int, one: int, other: int) -> None:
    bits = _every_kind_of_weight(seed, min(one, other), max(one, other))
    found = quantize(bits)
    back = dequantize(found.codes, found.scale)
    assert np.asarray(found.nonfinite).tolist() == [0, 0]
    for matrix in range(SHAPE[0]):
        codes, scale = host.quantize_block_fp8(bits[matrix])
        np.testing.assert_array_equal(np.asarray(found.codes[matrix]), codes)
        np.testing.assert_array_equal(np.asarray(found.scale[matrix]).view(np.uint32), scale.view(np.uint32))
        np.testing.assert_array_equal(np.asarray(back[matrix]), host.dequantize_block_fp8(codes, scale))


@settings(deadline=None, max_examples=30)
@given(st.binary(min_size=64, max_size=64))
def test_the_bfloat16_cast_agrees_with_the_host(raw: bytes) -> None:
    x = np.frombuffer(raw, np.float32)
    # Bits go in and out, so that nothing outside the function under test touches NaN or subnormals.
    cast = jax.jit(
        lambda bits: device.float32_to_bfloat16_bits(jax.lax.bitcast_convert_type(bits, jnp.float32))
    )
    np.testing.assert_array_equal(np.asarray(cast(x.view(np.uint32))), host.float32_to_bfloat16_bits(x))


def test_masters_and_their_bfloat16_cast_quantise_alike() -> None:
    weights = (np.random.default_rng(0).standard_normal(SHAPE) * 0.02).astype(np.float32)
    from_masters, from_cast = quantize(weights), quantize(jnp.asarray(weights).astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(from_masters.codes), np.asarray(from_cast.codes))
    codes, _ = host.quantize_block_fp8(host.float32_to_bfloat16_bits(weights[1]))
    np.testing.assert_array_equal(np.asarray(from_masters.codes[1]), codes)
    with pytest.raises(ValueError, match="float16"):
        device.quantize_block_fp8(jnp.zeros((2, 2), jnp.float16))


def test_weights_that_are_not_finite_are_counted_by_matrix() -> None:
    bits = np.zeros(SHAPE, np.uint16)
    bits[1, 3, 4], bits[1, 100, 200] = 0x7FC0, 0xFF80
    assert np.asarray(quantize(bits).nonfinite).tolist() == [0, 2]


def test_sharding_changes_no_bit() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("a", "b"))
    weights = (np.random.default_rng(1).standard_normal((4, 256, 512)) * 0.02).astype(np.float32)
    sharded = jax.device_put(weights, NamedSharding(mesh, PartitionSpec(None, "a", "b")))
    found, expected = quantize(sharded), quantize(weights)
    np.testing.assert_array_equal(np.asarray(found.codes), np.asarray(expected.codes))
    np.testing.assert_array_equal(np.asarray(found.scale), np.asarray(expected.scale))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("fraction", [0.0, 0.003, 0.5, 1.0])
def test_compacted_changes_are_those_of_numpy(dtype: type, fraction: float) -> None:
    rng = np.random.default_rng(int(fraction * 1000))
    old = rng.integers(0, 256, (3, 40, 33)).astype(dtype)
    moved = rng.random(old.shape) < fraction
    new = np.where(moved, old ^ rng.integers(1, 200, old.shape).astype(dtype), old)
    expected = np.flatnonzero(old.reshape(-1) != new.reshape(-1))
    count = len(expected)
    found = diff(new, old, max_changes=device.change_bucket(count, old.size))
    assert int(found.count) == count
    np.testing.assert_array_equal(np.asarray(found.positions)[:count], expected)
    np.testing.assert_array_equal(np.asarray(found.old)[:count], old.reshape(-1)[expected])
    np.testing.assert_array_equal(np.asarray(found.new)[:count], new.reshape(-1)[expected])
    assert not np.asarray(found.positions)[count:].any() and not np.asarray(found.new)[count:].any()


def test_too_small_a_bucket_keeps_the_first_changes_and_the_true_count() -> None:
    old = np.zeros((1, 4, 50), np.uint8)
    new = old.copy()
    new[0, 1:] = 7
    found = diff(new, old, max_changes=20)
    assert int(found.count) == 150
    assert np.asarray(found.positions).tolist() == list(range(50, 70))


def test_buckets_are_powers_of_two_so_that_few_programs_are_compiled() -> None:
    assert [device.change_bucket(n, 1 << 30) for n in (0, 1024, 1025, 300_000)] == [1024, 1024, 2048, 1 << 19]
    assert device.change_bucket(10, 100) == 100


@pytest.mark.parametrize(("dtype", "start"), [(np.uint8, 0), (np.uint16, 112)])
def test_class_ranks_are_those_of_the_codec(dtype: type, start: int) -> None:
    rng = np.random.default_rng(5)
    old = rng.integers(0, np.iinfo(dtype).max, (2, 30, 70), endpoint=True).astype(dtype)
    positions = np.sort(rng.choice(old.size, 300, replace=False)).astype(np.int32)
    ranks, sizes = rank(old, positions, start=start)
    fine = classes.fine_classes(old.reshape(-1), start)
    expected = [int((fine[:p] == fine[p]).sum()) for p in positions]
    np.testing.assert_array_equal(np.asarray(ranks), expected)
    by_matrix = [np.bincount(part, minlength=16).tolist() for part in fine.reshape(2, -1)]
    assert np.asarray(sizes).tolist() == by_matrix


def test_arrays_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8\[2, 2\] against a baseline of uint16\[2, 2\]"):
        device.diff_compact(jnp.zeros((2, 2), jnp.uint8), jnp.zeros((2, 2), jnp.uint16), 4)
    huge = jax.ShapeDtypeStruct((1 << 16, 1 << 15), jnp.uint8)
    with pytest.raises(ValueError, match="int32 positions"):
        jax.eval_shape(lambda a, b: device.diff_compact(a, b, 4), huge, huge)
