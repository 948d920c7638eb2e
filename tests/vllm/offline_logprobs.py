"""`python offline_logprobs.py DTYPE DIRECTORY...`: vLLM samples from each model, computing in DTYPE.

Prints a JSON line a model: prompts and sampled tokens, with the log-probability of each at temperature 1.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal, cast

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPTS = [[(7 * row + 3 * column) % 500 + 2 for column in range(8 + row)] for row in range(8)]
TOKENS = 24


def main() -> None:
    from vllm import LLM, SamplingParams

    dtype, *directories = sys.argv[1:]
    for directory in directories:
        engine = LLM(
            model=directory,
            dtype=cast(Literal["bfloat16", "float32"], dtype),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=len(PROMPTS),
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
        )
        sampling = SamplingParams(
            temperature=1.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False, seed=1
        )
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling)
        samples = []
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            made: Any = output.outputs[0]
            logprobs = [
                step[token].logprob for step, token in zip(made.logprobs, made.token_ids, strict=True)
            ]
            samples.append({"prompt": prompt, "tokens": list(made.token_ids), "logprobs": logprobs})
        print("RESULT", json.dumps(samples), flush=True)
        del engine


if __name__ == "__main__":
    main()
