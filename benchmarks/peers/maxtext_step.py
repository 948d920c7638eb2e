"""MaxText's own training loop on the benchmark's shape, held before each iteration until it is asked for.

Dropless: sparse_matmul without megablox, which is `jax.lax.ragged_dot` on a CPU.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

from turns import Turns  # noqa: E402

SHAPE = json.loads(sys.argv[1])


def settings(directory: str) -> list[str]:
    """Command line of MaxText for the shape."""
    values = {
        "run_name": "train_step",
        "base_output_directory": directory,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "steps": 1_000_000,
        "decoder_block": "mixtral",
        "base_emb_dim": SHAPE["hidden_size"],
        "base_num_query_heads": SHAPE["num_attention_heads"],
        "base_num_kv_heads": SHAPE["num_key_value_heads"],
        "head_dim": SHAPE["head_dim"],
        "base_num_decoder_layers": SHAPE["num_hidden_layers"],
        "base_mlp_dim": SHAPE["moe_intermediate_size"],
        "base_moe_mlp_dim": SHAPE["moe_intermediate_size"],
        "num_experts": SHAPE["n_routed_experts"],
        "num_experts_per_tok": SHAPE["num_experts_per_tok"],
        "vocab_size": SHAPE["vocab_size"],
        "max_target_length": SHAPE["sequence"],
        "per_device_batch_size": SHAPE["rows"],
        "dtype": "float32",
        "weight_dtype": "float32",
        "attention": "dot_product",
        "sparse_matmul": True,
        "megablox": False,
        "capacity_factor": -1.0,
        "remat_policy": SHAPE["maxtext_remat_policy"],
        "opt_type": "adamw",
        "enable_goodput_recording": False,
        "log_period": 1_000_000,
    }
    return [
        "train",
        os.path.join(_package(), "configs", "base.yml"),
        *(f"{k}={v}" for k, v in values.items()),
    ]


def _package() -> str:
    import maxtext

    return os.path.dirname(maxtext.__file__)


def main() -> None:
    turns = Turns()
    import jax
    from maxtext.trainers.pre_train import train

    started = time.perf_counter()
    steps: queue.Queue[threading.Event | None] = queue.Queue()
    iterate = train.training_loop_iteration

    def held(device_state, *rest):
        done = steps.get()
        if done is None:
            os._exit(0)
        metrics = iterate(device_state, *rest)
        jax.block_until_ready(device_state["state"])
        done.set()
        return metrics

    train.training_loop_iteration = held
    threading.Thread(target=train.main, args=(settings(SHAPE["directory"]),), daemon=True).start()

    def step() -> None:
        done = threading.Event()
        steps.put(done)
        while not done.wait(1.0):
            if threading.active_count() < 2:
                raise RuntimeError("MaxText's loop ended; its own message is above")

    step()
    turns.ready(compile_s=time.perf_counter() - started, version=jax.__version__)
    turns.serve(step)
    os._exit(0)


if __name__ == "__main__":
    main()
