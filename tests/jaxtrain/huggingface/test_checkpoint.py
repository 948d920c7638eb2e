"""What is wrong with a directory is found in its headers, all of it at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jaxtrain.huggingface.checkpoint import open_checkpoint, read_model_config
from jaxtrain.huggingface.errors import HuggingFaceError
from tests.jaxtrain.huggingface.directories import FP8, GLM, LLAMA, quantized, random_tensors, write


def problems(directory: Path) -> list[str]:
    with pytest.raises(HuggingFaceError) as caught:
        open_checkpoint(directory)
    assert str(directory) in str(caught.value)
    assert all(line in str(caught.value) for line in caught.value.problems)
    return caught.value.problems


def one(found: list[str], *parts: str) -> bool:
    return sum(all(part in line for part in parts) for line in found) == 1


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    tensors = random_tensors(GLM, torch.bfloat16)
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[gone]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 65)
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int64)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64).to(torch.float8_e4m3fn)
    tensors["model.vision.weight"] = torch.zeros(2)
    config = GLM | {"hidden_act": "gelu", "n_group": 4}
    found = problems(write(tmp_path / "model", config, tensors, shards=3))
    assert one(found, f"{gone}: missing", "[32, 64]")
    assert one(found, "q_proj.weight: shape [64, 65], expected [64, 64]")
    assert one(found, "model.norm.weight: dtype I64, expected F32 or F16 or BF16")
    assert one(found, "layers.0.mlp.up_proj.weight: dtype F8_E4M3", "quantization_config")
    assert one(found, "model.vision.weight: not a tensor of this model", "F32[2]")
    assert one(found, "hidden_act", "gelu") and one(found, "n_group", "4")
    assert len(found) == 7


def test_a_truncated_file_and_an_absent_one(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", LLAMA, random_tensors(LLAMA, torch.float32), shards=3)
    first, second, _ = sorted(directory.glob("*.safetensors"))
    size = first.stat().st_size
    with open(first, "r+b") as file:
        file.truncate(size - 1)
    second.unlink()
    found = problems(directory)
    assert one(found, f"{first}: truncated: {size - 1} bytes, its header describes {size}")
    assert one(found, f"{second}: no such file")
    assert any("missing; the model has it" in line for line in found)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]", b"\x09\0\0\0\0\0\0\0{'a': 1}}"]
)
def test_a_file_that_is_no_safetensors(tmp_path: Path, content: bytes) -> None:
    directory = write(tmp_path / "model", LLAMA, random_tensors(LLAMA, torch.float32))
    (directory / "model.safetensors").write_bytes(content)
    assert any(f"{directory}/model.safetensors: " in line for line in problems(directory))


def test_offsets_that_overlap(tmp_path: Path) -> None:
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}
    ).encode()
    directory = write(tmp_path / "model", LLAMA, random_tensors(LLAMA, torch.float32))
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert one(problems(directory), "b: F32[1] has 4 bytes and follows byte 4")


def test_an_index_that_leaves_the_directory_or_lies(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", LLAMA, random_tensors(LLAMA, torch.float32), shards=2)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    swapped = weight_map | {
        "model.norm.weight": next(f for f in weight_map.values() if f != weight_map["model.norm.weight"])
    }
    index.write_text(json.dumps({"weight_map": swapped}))
    assert one(problems(directory), "model.norm.weight: model.safetensors.index.json places it in")
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert one(problems(directory), "weight_map names '../other.safetensors'")
    index.write_text("{}")
    assert one(problems(directory), "not an index with a weight_map")


def test_an_index_of_an_earlier_download_beside_the_one_file_is_not_read(tmp_path: Path) -> None:
    """transformers takes the file."""
    tensors = random_tensors(LLAMA, torch.float32)
    directory = write(tmp_path / "model", LLAMA, tensors)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}))
    assert open_checkpoint(directory).tensors.keys() == tensors.keys()


def test_fp8_needs_its_scales_and_blocks_of_128(tmp_path: Path) -> None:
    stored, _ = quantized(random_tensors(LLAMA, torch.bfloat16))
    open_checkpoint(write(tmp_path / "good", LLAMA | {"quantization_config": FP8}, stored))
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    del stored[name]
    stored["model.layers.0.mlp.down_proj.weight_scale_inv"] = torch.ones(1, 3)
    found = problems(write(tmp_path / "scales", LLAMA | {"quantization_config": FP8}, stored))
    assert one(found, f"{name}: missing", "[2, 3]")
    assert one(found, "layers.0.mlp.down_proj.weight_scale_inv: F32[1, 3], expected F32[2, 3]")
    other = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    found = problems(write(tmp_path / "blocks", LLAMA | {"quantization_config": other}, stored))
    assert one(found, "quantization_config.weight_block_size: [64, 64]", "expected [128, 128]")


def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA, torch.bfloat16)
    head = tensors["model.embed_tokens.weight"].clone()
    open_checkpoint(write(tmp_path / "same", LLAMA, tensors | {"lm_head.weight": head}))
    head[5, 7] += 1
    assert one(
        problems(write(tmp_path / "other", LLAMA, tensors | {"lm_head.weight": head})), "tie_word_embeddings"
    )


def test_published_checkpoints_repeat_embedding_and_head_in_the_mtp_layer(tmp_path: Path) -> None:
    """GLM-4.5 and GLM-4.5-Air as published: `embed_tokens` and `shared_head.head` beside the originals."""
    config = GLM | {"num_nextn_predict_layers": 1}
    tensors = random_tensors(config, torch.bfloat16)
    prefix = f"model.layers.{GLM['num_hidden_layers']}"
    copies = {
        f"{prefix}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{prefix}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    opened = open_checkpoint(write(tmp_path / "same", config, tensors | copies, shards=3))
    assert {source.name for source in opened.sources} == tensors.keys()
    copies[f"{prefix}.shared_head.head.weight"][3, 5] += 1
    found = problems(write(tmp_path / "other", config, tensors | copies))
    assert one(found, f"{prefix}.shared_head.head.weight: differs from lm_head.weight")
    assert len(found) == 1


def test_mtp_layers_that_only_config_json_has_are_not_read(tmp_path: Path) -> None:
    """transformers 5 saves `num_nextn_predict_layers` as it was and none of the layers' tensors."""
    config = GLM | {"num_nextn_predict_layers": 1}
    tensors = random_tensors(GLM | {"num_nextn_predict_layers": 0}, torch.bfloat16)
    directory = write(tmp_path / "model", config, tensors)
    opened = open_checkpoint(directory)
    assert opened.hf_config == config | {"num_nextn_predict_layers": 0}
    assert read_model_config(directory) == opened.hf_config
    assert {source.name for source in opened.sources} == tensors.keys()
    whole = random_tensors(config, torch.bfloat16)
    gone = f"model.layers.{GLM['num_hidden_layers']}.enorm.weight"
    del whole[gone]
    assert one(problems(write(tmp_path / "part", config, whole)), f"{gone}: missing")


def test_no_directory_of_a_model(tmp_path: Path) -> None:
    assert one(problems(tmp_path), "config.json: no such file")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert one(problems(tmp_path), "no *.safetensors file", "download")
    (tmp_path / "pytorch_model.bin").touch()
    assert one(problems(tmp_path), "convert the pickled weights")
