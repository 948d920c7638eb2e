"""Which arguments of a vLLM server are its host's to set, and so not a config's."""

from __future__ import annotations

from collections.abc import Sequence

# By what decides them. The development endpoints run code for whoever reaches the server.
RESERVED = {
    "the server listens on a loopback address only": (
        "host", "port", "uds", "config", "headless", "root-path", "api-key", "middleware",
        "data-parallel-address", "dpa", "data-parallel-rpc-port", "dpp", "node-rank", "r", "nnodes", "n",
        "master-addr", "allowed-origins", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs",
    ),
    "the model is that of the run": (
        "model", "model-tag", "served-model-name", "tokenizer", "skip-tokenizer-init", "dtype",
        "generation-config", "load-format", "quantization", "q", "revision", "hf-overrides",
    ),
    "the protocol of updates and log-probabilities needs it": (
        "enable-scale-out", "logprobs-mode", "enable-prompt-tokens-details", "weight-transfer-config",
        "worker-extension-cls", "disable-uvicorn-access-log", "enable-return-routed-experts",
        "return-tokens-as-token-ids", "max-logprobs", "api-server-count", "asc",
    ),
    "it is weights.tensor_parallel": ("tensor-parallel-size", "tp"),
    "it is weights.data_parallel": ("data-parallel-size", "dp"),
    "it is weights.expert_parallel": ("enable-expert-parallel", "ep"),
    "it is batch.sequence_length": ("max-model-len",),
    "it is rollouts.slots": ("max-num-seqs",),
}  # fmt: skip


def problem(arguments: Sequence[str]) -> str:
    """Why these arguments cannot be added, "" if they can. Abbreviations and `_` for `-` count too."""
    for given in arguments:
        name = given.split("=", 1)[0].lstrip("-").split(".", 1)[0].replace("_", "-")
        if not given.startswith("-") or not name:
            continue  # the value of the argument before it
        name = name.removeprefix("no-")
        for reason, names in RESERVED.items():
            found = name in names or (
                given.startswith("--") and any(reserved.startswith(name) for reserved in names)
            )
            if found:
                return f"{given} cannot be set here: {reason}"
    return ""
