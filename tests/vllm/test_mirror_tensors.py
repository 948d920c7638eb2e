"""What the plugin reads out of a mirror, against the definition of the formats (tiny_model.py, in torch)."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_bridge.vllm_plugin.tensors import MirrorTensors
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import MirrorError
from tests.vllm import tiny_model
from tests.vllm.tiny_model import Tensors


@dataclass
class Held:
    directory: Path
    tensors: Tensors


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    run = tiny_model.run_info()
    mirror = Mirror(tmp_path_factory.mktemp("mirror"))
    tensors = tiny_model.random_tensors(run, 3)
    tiny_model.set_mirror(mirror, run, tensors, version=7)
    yield Held(mirror.directory, tensors)
    mirror.close()


def assert_same(found: dict[str, torch.Tensor], expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.shape == expected[name].shape, name
        assert (tiny_model.bits(tensor) == tiny_model.bits(expected[name])).all(), name


def test_an_fp8_engine_gets_codes_and_scales_as_they_are(held: Held) -> None:
    tensors = MirrorTensors(held.directory, version=7)
    assert_same(dict(tensors.load(tensors.names, native_fp8=True)), held.tensors)


def test_any_other_engine_gets_the_same_numbers_in_bf16_and_no_scales(held: Held) -> None:
    tensors = MirrorTensors(held.directory, version=7)
    assert_same(
        dict(tensors.load(tensors.names, native_fp8=False)), tiny_model.bfloat16_weights(held.tensors)
    )


PACKED = float(np.int32(0x7F7F7F7F).view(np.float32))  # four exponents in an int32, as some kernels take them


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 0.0, -1.0, 0.75, 2.0**127, PACKED])
@pytest.mark.parametrize("native_fp8", [True, False])
def test_a_scale_that_no_quantiser_makes_is_refused_by_name(
    wrong: float, native_fp8: bool, tmp_path: Path
) -> None:
    """The digests of this mirror are right: the trainer itself published the scale."""
    run = tiny_model.run_info()
    tensors = tiny_model.random_tensors(run, 3)
    name = next(name for name in tensors if name.endswith("weight_scale_inv"))
    tensors[name].reshape(-1)[-1] = wrong
    mirror = Mirror(tmp_path)
    tiny_model.set_mirror(mirror, run, tensors, version=1)
    assert mirror.verify() == len(tensors)
    found = MirrorTensors(tmp_path, version=1)
    refused = (
        f"{name}: scale {wrong!r} is not a power of two in ["
        if native_fp8
        else f"{name.removesuffix('_scale_inv')}: scale "
    )
    with pytest.raises(ValueError, match=re.escape(refused)):
        list(found.load(found.names, native_fp8=native_fp8))
    mirror.close()


def test_writing_to_a_tensor_does_not_reach_the_mirror(held: Held) -> None:
    name = "model.norm.weight"
    MirrorTensors(held.directory, version=7).canonical(name).zero_()
    again = MirrorTensors(held.directory, version=7).canonical(name)
    assert torch.equal(again, held.tensors[name])


def test_a_mirror_of_another_version_is_refused(held: Held) -> None:
    with pytest.raises(ValueError, match="holds version 7, version 8 was asked for"):
        MirrorTensors(held.directory, version=8)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MirrorError, match="holds no version"):
        MirrorTensors(tmp_path, version=1)


def test_a_serving_host_needs_no_jax() -> None:
    modules = "rollout_bridge.serve, rollout_bridge.vllm_plugin.tensors, rollout_bridge.vllm_plugin.units"
    program = f"import sys, {modules}; print('jax' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
