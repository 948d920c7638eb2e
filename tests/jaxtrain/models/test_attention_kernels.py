"""Every attention implementation that runs here is the same function, and keeps documents apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models import attention_chunked, attention_kernels
from jaxtrain.models.attention_kernels import attend_documents, documents, resolve
from jaxtrain.models.config import AttentionImplementation
from sharding.mesh import MeshSpec

B, S, H, K, WIDTH = 2, 40, 4, 2, 16
RNG = np.random.default_rng(0)
Q, KEYS, VALUES, COTANGENT = (
    RNG.normal(size=(B, S, heads, WIDTH)).astype(np.float32) for heads in (H, K, K, H)
)
SEGMENTS = np.array([[1] * 11 + [2] * 17 + [3] * 8 + [0] * 4, [1] * 30 + [2] * 10], np.int32)
WAYS = {
    "chunked": (AttentionImplementation.CHUNKED, None),
    "splash": (AttentionImplementation.SPLASH, None),
    "triton": (AttentionImplementation.TRITON, None),
    "ring of 4": (AttentionImplementation.AUTO, {"context": 4, "tensor": 2}),
    "ring of 2, kv heads shared": (AttentionImplementation.AUTO, {"context": 2, "tensor": 4}),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks in a row, some of which no query of a chunk may see."""
    monkeypatch.setattr(attention_chunked, "CHUNK", 8)
    monkeypatch.setattr(attention_kernels, "TRITON_BLOCK", 16)


def attend(name: AttentionImplementation, axes: dict[str, int] | None):
    """Outputs and gradients of queries, keys and values, jitted."""
    mesh = None if axes is None else MeshSpec(ici=axes).build()

    def objective(q, k, v):
        packed = documents(jnp.asarray(SEGMENTS), name, dtype=q.dtype, mesh=mesh)
        out = attend_documents(q, k, v, packed, implementation=name, mesh=mesh)
        valid = (SEGMENTS > 0)[..., None, None]
        return (out * COTANGENT * valid).sum(), out * valid

    return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize("way", WAYS)
def test_an_implementation_equals_the_masked_softmax(way):
    (_, expected), expected_gradients = attend(AttentionImplementation.XLA, None)(Q, KEYS, VALUES)
    run = attend(*WAYS[way])
    (_, found), gradients = run(Q, KEYS, VALUES)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(np.abs(expected).max()))
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * float(np.abs(wanted).max()))
    # Another first document, in keys and values as in queries, changes no bit of the others.
    first = (SEGMENTS == 1)[..., None, None]
    changed = (np.where(first, x[:, ::-1], x) for x in (Q, KEYS, VALUES))
    (_, other), _ = run(*changed)
    others = SEGMENTS > 1
    np.testing.assert_array_equal(np.asarray(other)[others], np.asarray(found)[others])
    assert (np.asarray(other)[SEGMENTS == 1] != np.asarray(found)[SEGMENTS == 1]).any()


def test_the_backward_pass_is_given_no_scores():
    """What the gradient keeps of whole-score attention is linear in the sequence, but for the mask."""
    packed = documents(jnp.asarray(SEGMENTS), AttentionImplementation.XLA, dtype=jnp.float32, mesh=None)

    def run(q, k, v):
        return attend_documents(q, k, v, packed, implementation=AttentionImplementation.XLA, mesh=None)

    _, backward = jax.vjp(run, Q, KEYS, VALUES)
    kept = [x for x in jax.tree.leaves(backward) if x.dtype == jnp.float32]
    assert sum(x.size for x in kept) <= Q.size + KEYS.size + VALUES.size


def test_memory_is_linear_in_the_sequence():
    """Twice the sequence, at most 2.5 times the temporaries; scores [S, S] would take 4 times."""

    def temporaries(length: int) -> int:
        shape = [jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.float32) for heads in (H, K, K)]
        segments = jnp.ones((1, length), jnp.int32)

        def objective(q, k, v):
            way = AttentionImplementation.CHUNKED
            packed = documents(segments, way, dtype=q.dtype, mesh=None)
            return attend_documents(q, k, v, packed, implementation=way, mesh=None).sum()

        compiled = jax.jit(jax.grad(objective, argnums=(0, 1, 2))).lower(*shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(1024) < 2.5 * temporaries(512)


@pytest.mark.parametrize(
    ("target", "axes", "size"),
    [
        ("cuda", None, 4096),
        ("tpu", None, 4096),
        ("cuda", {"context": 2}, 2048),
        ("tpu", {"context": 2}, 2048),
    ],
)
def test_a_program_for_an_accelerator_has_no_array_of_sequence_by_sequence(monkeypatch, target, axes, size):
    """What `auto` takes, with gradients. size: the tokens of a device. XLA's has the array."""
    monkeypatch.setattr(attention_kernels, "platform", lambda mesh: {"cuda": "gpu"}.get(target, target))
    monkeypatch.setattr(attention_kernels, "TRITON_BLOCK", 128)
    monkeypatch.setattr(attention_chunked, "CHUNK", 512)
    mesh = None if axes is None else MeshSpec(ici=axes).build(jax.devices()[:2])
    shapes = [jax.ShapeDtypeStruct((1, 4096, heads, 64), jnp.bfloat16) for heads in (H, K, K)]
    segments = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def lowered(way: str) -> str:
        def loss(q, k, v, segments):
            name = AttentionImplementation(way)
            packed = documents(segments, name, dtype=q.dtype, mesh=mesh)
            out = attend_documents(q, k, v, packed, implementation=name, mesh=mesh)
            return (out.astype(jnp.float32) ** 2).sum()

        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).trace(*shapes, segments)
        return program.lower(lowering_platforms=(target,)).as_text()

    text = lowered("auto")
    assert "4096x4096x" not in text
    assert f"{size}x{size}x" not in text
    assert ({"cuda": "xla.gpu.triton", "tpu": "tpu_custom_call"}[target] in text) == (axes is None)
    assert axes or "4096x4096x" in lowered("xla")


def test_what_runs_is_chosen_by_platform_and_mesh():
    names = [name for name in AttentionImplementation if name != "cudnn"]
    on_cpu = {name: resolve(name, dtype="bfloat16", mesh=None) for name in names}
    assert on_cpu.pop("auto") == "xla"
    assert all(found == name for name, found in on_cpu.items())
    split = MeshSpec(ici={"context": 8}).build()
    assert {resolve(name, dtype="bfloat16", mesh=split) for name in AttentionImplementation} == {"chunked"}
    with pytest.raises(ValueError, match="'cudnn' needs a GPU, but the devices are cpu"):
        resolve(AttentionImplementation.CUDNN, dtype="bfloat16", mesh=None)


@pytest.mark.parametrize(
    ("platform", "dtype", "chosen"),
    [
        ("gpu", "bfloat16", "triton"),
        ("gpu", "float32", "chunked"),
        ("tpu", "bfloat16", "splash"),
        ("tpu", "float32", "splash"),
        ("cpu", "bfloat16", "xla"),
        ("cpu", "float32", "xla"),
    ],
)
def test_auto_is_an_implementation_that_has_the_dtype(platform, dtype, chosen, monkeypatch):
    monkeypatch.setattr(attention_kernels, "platform", lambda mesh: platform)
    assert resolve(AttentionImplementation.AUTO, dtype=dtype, mesh=None) == chosen


def test_cudnn_in_float32_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(attention_kernels, "platform", lambda mesh: "gpu")
    assert resolve(AttentionImplementation.CUDNN, dtype="bfloat16", mesh=None) == "cudnn"
    with pytest.raises(ValueError, match="'cudnn' has no float32; compute in bfloat16, or choose auto"):
        resolve(AttentionImplementation.CUDNN, dtype="float32", mesh=None)


def test_a_sequence_that_cannot_be_halved_is_refused():
    q, k = np.ones((1, 12, 8, WIDTH), np.float32), np.ones((1, 12, 4, WIDTH), np.float32)
    mesh = MeshSpec(ici={"context": 4, "tensor": 2}).build()
    segments = jnp.ones((1, 12), jnp.int32)
    packed = documents(segments, AttentionImplementation.AUTO, dtype=q.dtype, mesh=mesh)
    with pytest.raises(ValueError, match="leaves 3 tokens on each, an odd number; .* a multiple of 8"):
        attend_documents(q, k, k, packed, implementation=AttentionImplementation.AUTO, mesh=mesh)
