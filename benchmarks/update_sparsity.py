"""How many stored values one step of Muon or AdamW changes, by kind of layer and learning rate.

    python benchmarks/update_sparsity.py MODEL [MODEL ...] --out DIR [--plot docs/images/update_sparsity.png]

MODEL is a run's directory or a Hugging Face one. The model samples sequences of its own; policy-gradient
steps on them (reward: the share of sampled tokens with an even id, centred over the sequences; any reward
with a signal would do) fill the optimizer's averages; then one more step is taken from the same state at each
learning rate, and the weights before and after are compared as they are published: BF16, and block-FP8 codes
where the plan quantises. Prints one JSON row for each model, optimizer, learning rate and kind of layer, and
keeps them in OUT/rows.jsonl, from which `--plot` draws:

`fp8_changed`, `bf16_changed`: fraction of codes and of BF16 values that differ. `predicted_fp8`,
`predicted_bf16`: the mean over weights of min(1, E|step| / spacing), for Gaussian steps of the RMS that was
taken, from the weights alone. `fp8_bytes`: of the codec's preset small, each tensor alone; `entropy_bytes`:
their conditional entropy. `update_rms`: of the step.

With `--save RATE` the versions before and after are written as Hugging Face directories, which
`benchmarks/delta.py --versions` reads.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import save_file

from jaxtrain.data.batch import Batch
from jaxtrain.losses.policies.double_sided import DoubleSided
from jaxtrain.losses.token_logprobs import token_logprobs
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import Definition, define
from jaxtrain.optim.optimizer import Method, OptimizerConfig, build
from jaxtrain.training.saved import open_model
from rollout_bridge import architectures, delta
from rollout_bridge.architectures.tensors import TensorSource
from rollout_bridge.quantization import host
from rollout_bridge.quantization.plan import Format, QuantizationPlan, plan_for

OPTIMIZERS = {
    "muon": OptimizerConfig(),
    "adamw": OptimizerConfig(matrices=Method.adamw, lm_head=Method.adamw),
}
SMALLEST_RATE = 1e-6  # of the steps that fill the averages
KINDS = (
    ("embedding", ("embed_tokens",)),
    ("head", ("lm_head",)),
    ("norms", ("norm",)),
    ("biases", (".bias",)),
    ("router", ("mlp.gate.", "e_score_correction")),
    ("experts", ("mlp.experts.",)),
    ("shared expert", ("shared_expert",)),
    ("attention q", ("q_proj",)),
    ("attention k", ("k_proj",)),
    ("attention v", ("v_proj",)),
    ("attention o", ("o_proj",)),
    ("dense MLP", ("mlp.",)),
)
Params = dict[str, jax.Array]


def kind_of(name: str) -> str:
    """Kind of layer of a Hugging Face tensor."""
    return next(kind for kind, marks in KINDS if any(mark in name for mark in marks))


@dataclass(frozen=True)
class Model:
    """A model as read: parameters and buffers float32, tensor names, plan of what is published."""

    name: str
    definition: Definition
    params: Params
    buffers: Params
    sources: tuple[TensorSource, ...]
    plan: QuantizationPlan
    hf_config: dict[str, Any]


def read(directory: Path) -> Model:
    """The model of a run or of a Hugging Face directory."""
    saved = open_model(directory)
    definition = define(ModelConfig.from_hf(saved.hf_config, compute_dtype="float32"))
    here = jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec())
    arrays = saved.load(definition.shapes, dict.fromkeys(definition.shapes, here))
    sources = tuple(architectures.tensors(saved.hf_config))
    return Model(
        name=directory.name,
        definition=definition,
        params={path: value for path, value in arrays.items() if path not in definition.buffers},
        buffers={path: value for path, value in arrays.items() if path in definition.buffers},
        sources=sources,
        plan=plan_for(sources, serving=None),
        hf_config=saved.hf_config,
    )


def sample(model: Model, *, rows: int, length: int, seed: int) -> Batch:
    """Sequences that the model wrote at temperature 1 after one random token, with their advantages."""
    definition, key = model.definition, jax.random.key(seed)
    everything = {**model.params, **model.buffers}
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    segments = jnp.ones((rows, length), jnp.int32)
    tokens = jax.random.randint(key, (rows, length), 0, definition.config.vocab_size)

    @jax.jit
    def hidden(params: Params, tokens: jax.Array) -> jax.Array:
        return definition.bind(params)(tokens, positions, segments)[0]

    @jax.jit
    def extend(params: Params, tokens: jax.Array, place: jax.Array) -> jax.Array:
        logits = hidden(params, tokens)[:, place] @ definition.head(params)
        chosen = jax.random.categorical(jax.random.fold_in(key, place), logits.astype(jnp.float32))
        return tokens.at[:, place + 1].set(chosen)

    for place in range(length - 1):
        tokens = extend(everything, tokens, jnp.asarray(place))
    targets = jnp.roll(tokens, -1, axis=1)
    flat = hidden(everything, tokens).reshape(rows * length, -1)
    logprobs = token_logprobs(flat, definition.head(everything), targets.reshape(-1)).logprobs
    reward = (targets[:, :-1] % 2 == 0).mean(axis=1)
    advantages = jnp.broadcast_to((reward - reward.mean())[:, None], (rows, length))
    weights = jnp.ones((rows, length)).at[:, -1].set(0.0)
    return Batch(
        {
            "tokens": tokens,
            "targets": targets,
            "loss_weights": weights,
            "segment_ids": segments,
            "positions": positions,
            "behavior_logprobs": logprobs.reshape(rows, length),
            "advantages": advantages,
            "temperature": jnp.ones((rows, length)),
        }
    )


def directions(model: Model, batch: Batch, config: OptimizerConfig, *, steps: int) -> tuple[Params, Params]:
    """(parameters, direction of the next step at learning rate 1) after `steps` on halves of `batch`."""
    optimizer = build(config, model.params)
    loss = DoubleSided()

    @jax.jit
    def advance(params: Params, state: optax.OptState, part: Batch) -> tuple[Params, optax.OptState]:
        def objective(params: Params) -> jax.Array:
            out = loss(model.definition, {**params, **model.buffers}, part)
            return out.loss / out.weight

        return optimizer.update(jax.grad(objective)(params), state, params)

    params, state = dict(model.params), optimizer.init(model.params)
    rng = np.random.default_rng(0)
    for number in range(steps):
        chosen = np.sort(rng.choice(batch.tokens.shape[0], batch.tokens.shape[0] // 2, replace=False))
        part = jax.tree.map(lambda array, chosen=chosen: array[chosen], batch)
        direction, state = advance(params, state, part)
        if number == steps - 1:
            return params, direction
        params = jax.tree.map(lambda p, d: p + SMALLEST_RATE * d, params, direction)
    raise ValueError("at least one step is needed")


def tensors(model: Model, arrays: Mapping[str, jax.Array]) -> Iterator[tuple[TensorSource, np.ndarray]]:
    """Each published tensor, float32, in its Hugging Face shape."""
    host_arrays = {path: np.asarray(value) for path, value in arrays.items()}
    for source in model.sources:
        if source.path in host_arrays:
            value = host_arrays[source.path][source.index]
            yield source, np.ascontiguousarray(value.T if source.transpose else value)


class Tally:
    """Sums of one kind of layer."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)

    @classmethod
    def over(cls, tallies: Iterable[Tally]) -> Tally:
        """All kinds together."""
        total = cls()
        for tally in tallies:
            for name, value in tally.sums.items():
                total.sums[name] += value
        return total

    def add(self, old: np.ndarray, step: np.ndarray, *, quantised: bool) -> None:
        """Counts one tensor: weights before, and the step."""
        sums = self.sums
        mean = math.sqrt(2 / math.pi) * float(np.sqrt(np.mean(step.astype(np.float64) ** 2)))
        before, after = host.float32_to_bfloat16_bits(old), host.float32_to_bfloat16_bits(old + step)
        sums["values"] += old.size
        sums["squares"] += float(np.sum(step.astype(np.float64) ** 2))
        sums["bf16"] += np.count_nonzero(before != after)
        sums["predicted_bf16"] += _crossings(old, mean, bits=8)
        if quantised:
            codes, scale = host.quantize_block_fp8(before)
            new_codes, _ = host.quantize_block_fp8(after)
            sums["codes"] += codes.size
            sums["fp8"] += np.count_nonzero(codes != new_codes)
            lowest = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: old.shape[0], : old.shape[1]] * 2.0**-6
            sums["predicted_fp8"] += _crossings(old, mean, bits=4, lowest=lowest)
            sums["bytes"] += len(delta.encode(codes, new_codes))
            sums["entropy"] += delta.conditional_entropy_bytes(codes, new_codes)

    def row(self) -> dict[str, Any]:
        sums = self.sums
        codes = sums["codes"]
        return {
            "values": int(sums["values"]),
            "update_rms": math.sqrt(sums["squares"] / sums["values"]),
            "bf16_changed": sums["bf16"] / sums["values"],
            "predicted_bf16": sums["predicted_bf16"] / sums["values"],
            "fp8_changed": sums["fp8"] / codes if codes else None,
            "predicted_fp8": sums["predicted_fp8"] / codes if codes else None,
            "fp8_bytes": int(sums["bytes"]) if codes else None,
            "entropy_bytes": round(sums["entropy"]) if codes else None,
        }


def _crossings(weights: np.ndarray, mean: float, *, bits: int, lowest: np.ndarray | float = 0.0) -> float:
    """Expected number of `weights` whose value in `bits` significant bits changes by a step of `mean` size.

    lowest: of normal numbers; below it values are evenly spaced.
    """
    _, exponent = np.frexp(np.maximum(np.abs(weights), lowest))
    return float(np.minimum(1.0, mean * np.exp2(bits - exponent.astype(np.float64))).sum())


def save(model: Model, arrays: Mapping[str, jax.Array], directory: Path) -> None:
    """The weights as a Hugging Face directory, BF16."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.hf_config))
    found = {source.name: value.astype(ml_dtypes.bfloat16) for source, value in tensors(model, arrays)}
    save_file(found, directory / "model.safetensors")


def measure(model: Model, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    batch = sample(model, rows=options.rows, length=options.length, seed=0)
    for optimizer in options.optimizers:
        params, direction = directions(model, batch, OPTIMIZERS[optimizer], steps=options.steps)
        steps = dict(tensors(model, direction))
        for rate in options.rates:
            kinds: dict[str, Tally] = defaultdict(Tally)
            for source, old in tensors(model, params):
                quantised = model.plan.formats[source.name] is Format.fp8_block
                step = np.float32(rate) * steps[source]
                kinds[kind_of(source.name)].add(old, step, quantised=quantised)
            for kind, tally in [*kinds.items(), ("all", Tally.over(kinds.values()))]:
                yield {
                    "model": model.name,
                    "optimizer": optimizer,
                    "learning_rate": rate,
                    "kind": kind,
                    **tally.row(),
                }
            if rate in options.save:
                moved = jax.tree.map(lambda p, d, rate=rate: p + rate * d, params, direction)
                for number, arrays in enumerate((params, moved)):
                    save(model, arrays, options.out / f"{model.name}-{optimizer}-{rate:g}" / str(number))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Fraction changed over learning rate: a row of panels a model, a line a kind of layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    kinds = [kind for kind, _ in KINDS if any(row["kind"] == kind for row in rows)]
    colors = {kind: pyplot.get_cmap("tab20")(number) for number, kind in enumerate([*kinds, "all"])}
    panels = [(o, f) for o in OPTIMIZERS for f in ("fp8", "bf16") if any(r["optimizer"] == o for r in rows)]
    figure, axes = pyplot.subplots(
        len(models), len(panels), figsize=(4 * len(panels), 3.6 * len(models)), squeeze=False, sharey=True
    )
    for model, line in zip(models, axes, strict=True):
        for (optimizer, form), axis in zip(panels, line, strict=True):
            for kind in [*kinds, "all"]:
                found = [
                    row
                    for row in rows
                    if (row["model"], row["optimizer"], row["kind"]) == (model, optimizer, kind)
                    and row[f"{form}_changed"]
                ]
                x = [row["learning_rate"] for row in found]
                wide = {"color": "black", "linewidth": 2} if kind == "all" else {"color": colors[kind]}
                axis.plot(x, [100 * row[f"{form}_changed"] for row in found], marker=".", label=kind, **wide)
                if kind == "all":
                    predicted = [100 * row[f"predicted_{form}"] for row in found]
                    axis.plot(x, predicted, "k:", label="all, predicted")
            axis.set(xscale="log", yscale="log", title=f"{model}: {optimizer}, {form}", ylim=(1e-3, 120))
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("learning rate")
    for axis in axes[:, 0]:
        axis.set_ylabel("% of values that change in a step")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="center right")
    figure.tight_layout(rect=(0, 0, 0.89, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, default=Path("runs/update_sparsity"))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--save", type=float, nargs="*", default=[])
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "rows.jsonl"
    for directory in options.models:
        model = read(directory)
        with kept.open("a") as file:
            for row in measure(model, options):
                file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    if options.plot:
        newest = {
            (row["model"], row["optimizer"], row["learning_rate"], row["kind"]): row
            for row in map(json.loads, kept.read_text().splitlines())
        }
        plot(list(newest.values()), options.plot)


if __name__ == "__main__":
    main()
