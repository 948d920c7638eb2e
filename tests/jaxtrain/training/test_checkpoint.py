"""Checkpoints: what was saved comes back, on any mesh, or an error says why not."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.optim.optimizer import OptimizerConfig, build
from jaxtrain.training.checkpoint import Checkpointer, CheckpointError, UnreadableCheckpoint
from jaxtrain.training.integrity import digests
from jaxtrain.training.steps import saved_steps

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkpointer(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, save_interval_steps=10)
    yield checkpointer
    checkpointer.close()


def _tree(seed: float):
    return {
        "params": {
            "moe/mlp/router/kernel": jnp.full((2, 8, 4), float(seed)),
            "final_norm": jnp.full((8,), seed, jnp.bfloat16),
        },
        "count": jnp.asarray(int(seed)),
        "keys": np.full((2,), int(seed), np.uint32),
    }


def _assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_round_trip_of_the_optimizer_state_and_data(checkpointer):
    params = {"embedding": jnp.ones((6, 4)), "dense/mlp/up_proj/kernel": jnp.full((2, 4, 3), 0.5)}
    optimizer = build(OptimizerConfig(), params)
    gradients = jax.tree.map(lambda p: p * 0.25, params)
    _, state = optimizer.update(gradients, optimizer.init(params), params)
    data = {"tokens_seen": 23 * 10**12, "loader": {"epoch": 1}, "name": "é"}
    assert checkpointer.save(10, (params, state), data)
    checkpointer.wait()
    restored = checkpointer.restore(None, jax.eval_shape(lambda: (params, state)))
    assert restored.step == 10
    assert restored.data == data
    assert isinstance(restored.arrays[1].adamw, optax.ScaleByAdamState)
    _assert_same(restored.arrays, (params, state))


def test_saves_at_the_interval_or_when_forced_and_keeps_the_newest(checkpointer):
    taken = [checkpointer.save(step, _tree(step), {"step": step}) for step in (5, 10, 20)]
    taken.append(checkpointer.save(25, _tree(25), {"step": 25}, force=True))
    taken.append(checkpointer.save(25, _tree(26), {"step": 26}, force=True))
    checkpointer.wait()
    assert taken == [False, True, True, True, False]
    assert checkpointer.all_steps() == [20, 25]
    assert checkpointer.latest() == 25
    assert checkpointer.restore(None, _tree(0)).step == 25
    restored = checkpointer.restore(20, _tree(0))
    _assert_same(restored.arrays, _tree(20))
    assert restored.data == {"step": 20}
    assert isinstance(restored.arrays["keys"], np.ndarray)
    with pytest.raises(CheckpointError, match="cannot save step 10, step 25 is there already"):
        checkpointer.save(10, _tree(10), {})


def test_donated_arrays_are_saved_as_they_were(checkpointer):
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    array = jnp.arange(2**20, dtype=jnp.float32)
    expected = np.array(array)
    overwrite(jnp.zeros_like(array)).block_until_ready()
    checkpointer.save(10, {"x": array}, {})
    for _ in range(3):
        array = overwrite(array)
    array.block_until_ready()
    restored = _restore_newest(checkpointer, {"x": jax.ShapeDtypeStruct(expected.shape, expected.dtype)})
    np.testing.assert_array_equal(np.asarray(restored.arrays["x"]), expected)


def _restore_newest(checkpointer, like):
    checkpointer.wait()
    return checkpointer.restore(None, like)


@pytest.mark.parametrize(("saved", "wanted"), [((8,), (2, 4)), ((2, 4), (4,)), ((4, 2), (1,))])
def test_restores_onto_another_mesh(checkpointer, saved, wanted):
    def sharding(shape):
        devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
        mesh = Mesh(devices, ("expert", "fsdp")[: len(shape)])
        return NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

    values = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    checkpointer.save(10, {"x": jax.device_put(values, sharding(saved))}, {})
    like = {"x": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding(wanted))}
    restored = _restore_newest(checkpointer, like)
    assert restored.arrays["x"].sharding == like["x"].sharding
    np.testing.assert_array_equal(np.asarray(restored.arrays["x"]), values)


def test_nothing_to_restore(checkpointer):
    with pytest.raises(
        CheckpointError, match=r"checkpoints: found no finished checkpoint.*start without restoring"
    ):
        checkpointer.restore(None, _tree(0))
    checkpointer.save(10, _tree(10), {})
    checkpointer.wait()
    with pytest.raises(CheckpointError, match=r"found no step 30, expected one of \[10\]"):
        checkpointer.restore(30, _tree(0))


def test_a_different_state_is_named_leaf_by_leaf(checkpointer):
    checkpointer.save(10, _tree(10), {})
    like = _tree(0)
    like["params"]["moe/mlp/router/kernel"] = jnp.zeros((2, 8, 6))
    like["params"]["final_norm"] = jnp.zeros((8,), jnp.float32)
    like["extra"] = like.pop("count")
    checkpointer.wait()
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore(10, like)
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "count: found int32[], expected nothing",
        "extra: found nothing, expected int32[]",
        "params/final_norm: found bfloat16[8], expected float32[8]",
        "params/moe/mlp/router/kernel: found float32[2, 8, 4], expected float32[2, 8, 6]",
    ]
    assert "checkpoints/10: 4 leaves" in str(error.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncate", "delete arrays", "delete metadata"])
def test_a_damaged_checkpoint_says_what_to_restore_instead(checkpointer, damage):
    for step in (10, 20):
        checkpointer.save(step, {"x": jnp.arange(4096.0)}, {"step": step})
    checkpointer.wait()
    arrays = Path(checkpointer.directory) / "20" / "arrays"
    if damage == "truncate":
        files = [file for file in arrays.rglob("d/*") if file.is_file()]
        assert files
        for file in files:
            os.truncate(file, file.stat().st_size // 2)
    elif damage == "delete arrays":
        shutil.rmtree(arrays)
    else:
        (arrays / "_METADATA").unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoints/20: could not be read.*restore one of \[10\]"
    ):
        checkpointer.restore(None, {"x": jnp.zeros(4096)})
    like = {"x": jax.ShapeDtypeStruct((4096,), jnp.float32)}
    assert checkpointer.restore_newest(like).step == 10
    assert saved_steps(checkpointer.directory) == checkpointer.all_steps() == [10]
    assert checkpointer.save(20, {"x": jnp.ones(4096)}, {"step": "again"}, force=True)
    checkpointer.wait()
    assert checkpointer.restore_newest(like).data == {"step": "again"}
    gc.collect()  # Orbax leaves the coroutines of reads that failed: theirs are the warnings ignored here


def test_where_no_checkpoint_can_be_read_the_newest_is_named_and_all_stay(checkpointer):
    for step in (10, 20):
        checkpointer.save(step, {"x": jnp.arange(8.0)}, {})
    checkpointer.wait()
    for step in (10, 20):
        shutil.rmtree(Path(checkpointer.directory) / str(step) / "arrays")
    with pytest.raises(UnreadableCheckpoint, match="checkpoints/20: could not be read"):
        checkpointer.restore_newest({"x": jnp.zeros(8)})
    assert saved_steps(checkpointer.directory) == [10, 20]


def test_another_state_is_an_error_not_a_reason_to_go_back(checkpointer):
    for step in (10, 20):
        checkpointer.save(step, {"x": jnp.arange(8.0)}, {})
    checkpointer.wait()
    with pytest.raises(CheckpointError, match="checkpoints/20: 1 leaves are not those of this state"):
        checkpointer.restore_newest({"x": jnp.zeros(9)})
    assert saved_steps(checkpointer.directory) == [10, 20]


def test_a_flipped_bit_names_the_leaf(checkpointer):
    """TensorStore decodes most flipped bits of an array into other numbers without an error."""
    tree = {"a/b": jax.random.normal(jax.random.key(0), (8192,)), "c": jnp.ones(4)}
    checkpointer.save(10, tree, {})
    checkpointer.wait()
    arrays = Path(checkpointer.directory) / "10" / "arrays"
    file = max(arrays.rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"/10: could not be read: \['a/b'\] are not what was saved"):
        checkpointer.restore(10, tree)


def test_digests_are_of_bits_and_places_on_any_mesh():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec("y", "x"))
    values = np.random.default_rng(0).normal(size=(6, 8))
    for dtype in (jnp.float32, jnp.bool_, jnp.float8_e4m3fn):
        array = jnp.asarray(values > 0 if dtype is jnp.bool_ else values * 9).astype(dtype)
        changed = array.at[5, 7].set(jnp.where(array[5, 7] == 0, 1, 0).astype(dtype))
        found = digests(
            {
                "array": array,
                "sharded": jax.device_put(array, sharding),
                "numpy": np.asarray(array),
                "changed": changed,
                "turned": array[::-1],
            }
        )
        assert found["array"] == found["sharded"] == found["numpy"]
        assert len(set(found.values())) == 3
    zeros = digests({"plus": jnp.zeros(3), "minus": -jnp.zeros(3), "empty": jnp.zeros(0)})
    assert zeros["plus"] != zeros["minus"]
    assert zeros["empty"] == 0


def test_leaves_that_are_no_arrays_or_share_a_path_are_refused(checkpointer):
    with pytest.raises(CheckpointError, match="a/b: found str, expected an array; put it into data"):
        checkpointer.save(10, {"a": {"b": "text"}}, {})
    with pytest.raises(CheckpointError, match="a/b: two leaves have this path"):
        checkpointer.save(10, {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, {})


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from orbax.checkpoint._src.path import atomicity
from jaxtrain.training.checkpoint import Checkpointer

checkpointer = Checkpointer(sys.argv[1], keep=3, save_interval_steps=1)
checkpointer.save(1, {"x": jnp.full((1024,), 1.0)}, {"step": 1})
checkpointer.wait()

async def killed(self, *args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

atomicity.AtomicRenameTemporaryPath.finalize = killed
checkpointer.save(2, {"x": jnp.full((1024,), 2.0)}, {"step": 2})
checkpointer.wait()
"""


def test_killed_while_saving_leaves_the_checkpoint_before_it(tmp_path):
    """The process dies where the finished files would get their final name, just before the commit."""
    directory = tmp_path / "checkpoints"
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(directory)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert [path.name for path in directory.iterdir() if path.name.startswith("2")], "the save had begun"
    checkpointer = Checkpointer(directory, keep=3, save_interval_steps=1)
    like = {"x": jnp.zeros(1024)}
    restored = checkpointer.restore(None, like)
    assert (restored.step, restored.data) == (1, {"step": 1})
    np.testing.assert_array_equal(np.asarray(restored.arrays["x"]), 1.0)
    assert checkpointer.save(2, {"x": jnp.full((1024,), 3.0)}, {"step": 2})
    checkpointer.wait()
    np.testing.assert_array_equal(np.asarray(checkpointer.restore(2, like).arrays["x"]), 3.0)
    checkpointer.close()
