"""transformers' Glm4Moe with grouped expert products under torch.compile and torch's AdamW, on the shape."""

from __future__ import annotations

import json
import os
import sys
import time

from turns import Turns

SHAPE = json.loads(sys.argv[1])


def main() -> None:
    turns = Turns()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "first_k_dense_replace", "intermediate_size",
        "moe_intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "n_routed_experts",
        "num_experts_per_tok", "n_shared_experts", "routed_scaling_factor", "norm_topk_prob",
        "partial_rotary_factor", "use_qk_norm", "attention_bias", "rms_norm_eps", "tie_word_embeddings",
    )  # fmt: skip
    config = Glm4MoeConfig(
        **{name: SHAPE[name] for name in names},
        max_position_embeddings=SHAPE["sequence"],
        n_group=1,
        topk_group=1,
    )
    config._experts_implementation = "grouped_mm"
    model = Glm4MoeForCausalLM._from_config(config, experts_implementation="grouped_mm", dtype=torch.float32)
    model.train()
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            # Compiled, float32 experts take a fallback whose backward inductor refuses (transformers 5.19);
            # outside the graph they take torch's own grouped_mm.
            module.forward = torch.compiler.disable(module.forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, betas=(0.9, 0.95), weight_decay=0.1)
    compiled = torch.compile(model)
    tokens = torch.randint(0, config.vocab_size, (SHAPE["rows"], SHAPE["sequence"]))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        float(loss.detach())

    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    step()  # the optimizer's state exists from here on
    turns.ready(
        compile_s=first, version=torch.__version__, parameters=sum(p.numel() for p in model.parameters())
    )
    turns.serve(step)


if __name__ == "__main__":
    main()
