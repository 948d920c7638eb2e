"""The files a mirror keeps and those it makes for engines."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file

from rollout_bridge import architectures
from rollout_bridge.quantization import host
from rollout_bridge.quantization.plan import Format, scale_name
from rollout_bridge.weights.read import materialize
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import MirrorError, MirrorView
from tests.rollout_bridge.weights import tiny


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A reader at version 1, and the parameters it stands for."""
    directory = tmp_path_factory.mktemp("held")
    store = tiny.open_store(directory.name)
    trainer = tiny.publisher(store)
    trainer.take_over()
    tree = tiny.params(3)
    trainer.publish(tiny.on_device(tree), step=11).result(300)
    trainer.close()
    reader = tiny.subscriber(store, directory / "mirror")
    reader.advance()
    return reader, tree


def bfloat16(run, tree):
    """The weights a BF16 engine must serve: each tensor quantised and back, as the plan says."""
    bits = tiny.canonical(run, tree)
    return {
        name: host.dequantize_block_fp8(bits[name], bits[scale_name(name)].view(np.float32))
        if chosen is Format.fp8_block
        else bits[name]
        for name, chosen in run.plan.formats.items()
    }


def test_another_process_maps_the_same_tensors_read_only(held):
    reader, tree = held
    view = MirrorView.open(reader.mirror.directory)
    assert (view.version, view.state.step) == (1, 11)
    index = json.loads((reader.mirror.directory / "index.json").read_bytes())
    raw = (reader.mirror.directory / index["file"]).read_bytes()
    for name, bits in tiny.canonical(reader.mirror.view.run, tree).items():
        np.testing.assert_array_equal(view.tensor(name), bits)
        entry = index["tensors"][name]
        assert raw[entry["offset"] : entry["offset"] + bits.nbytes] == bits.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        reader.mirror.tensor("model.norm.weight")[0] = 1


def test_a_mirror_has_one_owner(held):
    reader, _ = held
    with pytest.raises(MirrorError, match="another process owns it"):
        Mirror(reader.mirror.directory)


def test_an_empty_directory_is_no_view(tmp_path):
    with pytest.raises(MirrorError, match="holds no version"):
        MirrorView.open(tmp_path)
    with pytest.raises(MirrorError, match="holds no version"):
        _ = Mirror(tmp_path).view


def test_a_bf16_directory_loads_in_transformers_with_exactly_the_dequantised_weights(held, tmp_path):
    from transformers import Glm4MoeForCausalLM

    reader, tree = held
    directory = reader.mirror.materialize(tmp_path, "bf16")
    model, report = Glm4MoeForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "again")
    served = load_file(tmp_path / "again" / "model.safetensors")
    expected = bfloat16(reader.mirror.view.run, tree)
    assert served.keys() == expected.keys()
    for name, bits in expected.items():
        values = served[name].to(torch.float32).numpy()
        if bits.dtype == np.uint16:
            np.testing.assert_array_equal(values, bits.view(ml_dtypes.bfloat16).astype(np.float32))
        else:  # float32 in the chain, loaded as bfloat16 by transformers
            np.testing.assert_allclose(values, bits.view(np.float32), rtol=2**-8)


def test_an_fp8_directory_is_the_canonical_bits_with_a_quantization_config(held, tmp_path):
    reader, tree = held
    directory = reader.mirror.materialize(tmp_path, "fp8")
    tensors = load_file(directory / "model.safetensors")
    expected = tiny.canonical(reader.mirror.view.run, tree)
    assert tensors.keys() == expected.keys()
    kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    for name, bits in expected.items():
        np.testing.assert_array_equal(tensors[name].view(kinds[bits.dtype.itemsize]).numpy(), bits)
    plan = reader.mirror.view.run.plan
    quantized = next(n for n, chosen in plan.formats.items() if chosen is Format.fp8_block)
    assert tensors[quantized].dtype == torch.float8_e4m3fn
    config = json.loads((directory / "config.json").read_text())
    assert config["quantization_config"] == plan.hf_quantization_config()
    assert config["architectures"] == [architectures.class_name(tiny.CONFIG)]


def test_a_directory_is_stamped_immutable_and_made_once(held, tmp_path):
    reader, _ = held
    directory = reader.mirror.materialize(tmp_path, "bf16")
    stamp = materialize.read_stamp(directory)
    assert stamp is not None
    assert (stamp["version"], stamp["incarnation"], stamp["step"]) == (1, 1, 11)
    assert stamp["run_id"] == reader.mirror.view.run.run_id
    assert (directory / "tokenizer.json").read_text() == reader.mirror.view.run.tokenizer["tokenizer.json"]
    assert all(path.stat().st_mode & 0o222 == 0 for path in directory.iterdir())
    before = (directory / "model.safetensors").stat()
    assert reader.mirror.materialize(tmp_path, "bf16") == directory
    assert (directory / "model.safetensors").stat() == before
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    with pytest.raises(ValueError, match="'int4' is not 'fp8' or 'bf16'"):
        reader.mirror.materialize(tmp_path, "int4")


def test_a_failed_directory_leaves_nothing(held, tmp_path, monkeypatch):
    reader, _ = held
    monkeypatch.setattr(materialize, "dequantize_block_fp8", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reader.mirror.materialize(tmp_path, "bf16")
    assert not list(tmp_path.iterdir())


def test_a_large_model_is_split_with_an_index(held, tmp_path):
    reader, _ = held
    whole = load_file(reader.mirror.materialize(tmp_path, "bf16") / "model.safetensors")
    split = materialize.materialize(reader.mirror.view, tmp_path / "split", "bf16", shard_bytes=50_000)
    index = json.loads((split / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        with safetensors.safe_open(split / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                assert index["weight_map"][name] == file
                torch.testing.assert_close(opened.get_tensor(name), whole[name], rtol=0, atol=0)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
