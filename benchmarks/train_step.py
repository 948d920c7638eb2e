"""Speed of a whole training step against MaxText and torch, on one small mixture of experts.

    python benchmarks/train_step.py [--peers maxtext,torch] [--rounds 5] [--steps 4] [--large-pages all]

4 layers, width 256, 4 heads (2 KV) of 64, 8 experts top-2 of width 512 and no shared one, vocabulary 8192, 4
rows of 256 tokens, float32, AdamW for all parameters, dropless. Each program runs in a process and an
environment of its own and they take turns, `--steps` steps a turn, so that other work on the machine falls on
all alike; medians over all turns. Prints one JSON object:

    tokens_per_s      {ours, maxtext_dropless, torch}
    ratio_maxtext     ours over MaxText's; ratio_torch: ours over torch's
    matmul_fraction   model FLOPs per second of ours, over the rate of a 2048^3 float32 product that the
                      same process measures after each of its turns. Model FLOPs: 6 for each matrix entry
                      that a token passes (its two experts, the head, no embedding) and attention over the
                      keys it sees (`jaxtrain.models.flops`); padding and recomputation do not count
    processor_*       the same of processor time, all threads, for a machine that is not idle
    compile_s         the first step of each
    recompilations    of ours after its first step

Peers are installed under `--environments` the first time they are asked for: MaxText needs a Python 3.12.
torch is Glm4Moe of transformers, grouped_mm experts, torch.compile. MaxText's rematerialisation is
`minimal_with_context`, the least it has; the others recompute no layer. The learning rate is MaxText's 3e-5
everywhere: at 1e-3 from random weights every token soon chooses the same two experts. malloc has large pages
as `jaxtrain train` sets them: by default for the peers as well, with `--large-pages ours` for ours alone (the
peers as they come), with `none` for nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxtrain.commands.large_pages import with_large_pages

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "peers"
SHAPE: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 0,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10_000.0,
    "use_qk_norm": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
RUN: dict[str, Any] = {"rows": 4, "sequence": 256}
REQUIREMENTS = {
    "maxtext": ("3.12", ["maxtext[tpu]==0.2.5"]),
    "torch": ("3.11", ["torch==2.13.0", "transformers==5.19.0", "setuptools"]),
}
KEYS = {"ours": "ours", "maxtext": "maxtext_dropless", "torch": "torch"}


class PeerError(RuntimeError):
    """A program could not be installed, started or kept running; says what it printed last."""


def environment(peer: str, directory: Path) -> Path:
    """The Python of a peer's own environment, made and filled if it is not there."""
    version, requirements = REQUIREMENTS[peer]
    python = directory / peer / "bin" / "python"
    stamp = directory / peer / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == requirements:
        return python
    commands = [
        [_python(version), "-m", "venv", str(directory / peer)],
        [str(python), "-m", "pip", "install", "--quiet", *requirements],
    ]
    for command in commands:
        print(f"train_step: {' '.join(command)}", file=sys.stderr)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerError(f"{peer}: {' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    stamp.write_text(json.dumps(requirements))
    return python


def _python(version: str) -> str:
    """An interpreter of that version: this one, one on the path, or one of pyenv's."""
    if sys.version.startswith(version):
        return sys.executable
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}*/bin/python")), reverse=True)
    for candidate in filter(None, candidates):
        found = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if found.stdout.startswith(f"Python {version}"):
            return candidate
    raise PeerError(f"no Python {version} on the path or among pyenv's; install one, or leave this peer out")


class Program:
    """A timed process. Everything but its answers goes to a log file."""

    def __init__(self, name: str, python: Path, scratch: Path, *, large_pages: bool) -> None:
        self.name = name
        self.log = scratch / f"{name}.log"
        shape = {
            **SHAPE,
            **RUN,
            "directory": str(scratch),
            "maxtext_remat_policy": "minimal_with_context",
        }
        variables = with_large_pages(os.environ) if large_pages else {**os.environ}
        if name == "ours":
            variables["PYTHONPATH"] = str(REPOSITORY)
        else:
            variables.pop("PYTHONPATH", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), str(PROGRAMS / f"{name}_step.py"), json.dumps(shape)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=variables,
                cwd=scratch,
            )
        self.start = self._answer()

    def steps(self, count: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} ended; its last words: {self.log.read_text()[-3000:]}")
        return json.loads(line)


def measure(programs: list[Program], *, rounds: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Turn by turn, the order reversed every other round."""
    turns: dict[str, list[dict[str, Any]]] = {program.name: [] for program in programs}
    for index in range(rounds):
        for program in programs if index % 2 == 0 else reversed(programs):
            turns[program.name].append(program.steps(steps))
    return turns


def report(programs: list[Program], turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    tokens = RUN["rows"] * RUN["sequence"]
    wall = {name: statistics.median(s for t in of for s in t["seconds"]) for name, of in turns.items()}
    processor = {name: statistics.median(t["processor"] for t in of) for name, of in turns.items()}
    start = {program.name: program.start for program in programs}
    flops = start["ours"]["flops_per_token"] * tokens
    rate = statistics.median(t["matmul_flops_per_s"] for t in turns["ours"])
    processor_rate = statistics.median(t["matmul_flops_per_processor_s"] for t in turns["ours"])
    result: dict[str, Any] = {
        "tokens_per_s": {KEYS[name]: round(tokens / seconds, 1) for name, seconds in wall.items()},
        "matmul_fraction": round(flops / wall["ours"] / rate, 4),
        "processor_s": {KEYS[name]: round(seconds, 4) for name, seconds in processor.items()},
        "processor_matmul_fraction": round(flops / processor["ours"] / processor_rate, 4),
        "matmul_gflops_per_s": round(rate / 1e9, 1),
        "matmul_gflops_per_processor_s": round(processor_rate / 1e9, 1),
        "flops_per_token": start["ours"]["flops_per_token"],
        "parameters": start["ours"]["parameters"],
        "compile_s": {KEYS[name]: round(facts["compile_s"], 1) for name, facts in start.items()},
        "recompilations": turns["ours"][-1]["recompilations"],
        "load_violation": round(turns["ours"][-1]["load_violation"], 3),
        "versions": {KEYS[name]: facts["version"] for name, facts in start.items()},
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
    }
    for peer, key in (("maxtext", "ratio_maxtext"), ("torch", "ratio_torch")):
        if peer in wall:
            result[key] = round(wall[peer] / wall["ours"], 3)
            result[f"processor_{key}"] = round(processor[peer] / processor["ours"], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="", help="maxtext, torch or both, with a comma")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each program in a round")
    parser.add_argument("--environments", type=Path, default=REPOSITORY / ".venv-peers")
    parser.add_argument("--large-pages", choices=["all", "ours", "none"], default="all")
    arguments = parser.parse_args()
    peers = [peer for peer in arguments.peers.split(",") if peer]
    unknown = set(peers) - REQUIREMENTS.keys()
    if unknown:
        parser.error(f"--peers: {sorted(unknown)} unknown; expected {sorted(REQUIREMENTS)}")
    pythons = {"ours": Path(sys.executable)}
    pythons |= {peer: environment(peer, arguments.environments) for peer in peers}
    with tempfile.TemporaryDirectory() as scratch:
        programs: list[Program] = []
        try:
            for name, python in pythons.items():
                large_pages = arguments.large_pages in ("all", name)
                programs.append(Program(name, python, Path(scratch), large_pages=large_pages))
            turns = measure(programs, rounds=arguments.rounds, steps=arguments.steps)
            print(json.dumps({**report(programs, turns), "large_pages": arguments.large_pages}, indent=2))
        finally:
            for program in programs:
                program.close()


if __name__ == "__main__":
    main()
