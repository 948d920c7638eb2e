"""A family of models as a table: the meaning of its config.json, and the tensors of its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_bridge.architectures import rope
from rollout_bridge.architectures.decoder import ArchitectureError, DecoderConfig
from rollout_bridge.architectures.layers import decoder as decoder_tensors
from rollout_bridge.architectures.rope import RopeScaling
from rollout_bridge.architectures.tensors import TensorSource

Json = Mapping[str, Any]


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


@dataclass(frozen=True, kw_only=True)
class Field:
    """One value of `DecoderConfig` in which models of an architecture may differ.

    name: in DecoderConfig. keys: in config.json, the first is written; the name itself when empty.
    absent: value of a config.json without it (transformers' default), REQUIRED if it must be there; a
    function computes it from the config.json.
    new: its value in an experiment that leaves it out, REQUIRED if it must be given.
    """

    name: str
    keys: tuple[str, ...] = ()
    absent: Any = REQUIRED
    new: Any = REQUIRED

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.keys or (self.name,)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family of models that transformers and vLLM know by `model_type`.

    class_name: the Hugging Face class. fields: what its models differ in.
    implied: values of DecoderConfig that are the same in all of them; a function derives the value from the
    fields and the config.json, which is empty for an experiment.
    expected: fields of config.json that change the computation, with the one value implemented; absent or
    null also counts. written: more fields for config.json.
    refusals: config.json -> lines about other values that are not implemented.
    tensors: every tensor of a decoder's checkpoint, in the order of the file.
    duplicates: tensors that a published checkpoint may have beside them, each with the one it repeats.
    """

    model_type: str
    class_name: str
    fields: tuple[Field, ...]
    implied: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    refusals: Callable[[Json], list[str]] = lambda _: []
    tensors: Callable[[DecoderConfig], Iterable[TensorSource]] = decoder_tensors
    duplicates: Callable[[DecoderConfig], dict[str, str]] = lambda _: {}

    def __post_init__(self) -> None:
        """Raises `ArchitectureError` unless fields and implied give every number of a decoder once."""
        given = [item.name for item in self.fields] + list(self.implied)
        known = {item.name: item.default for item in dataclasses.fields(DecoderConfig)}
        needed = {name for name, default in known.items() if default is dataclasses.MISSING}
        problems = {
            "unknown": sorted(set(given) - known.keys()),
            "given twice": sorted({name for name in given if given.count(name) > 1}),
            "missing": sorted(needed - {"architecture", *given}),
        }
        if any(problems.values()):
            lines = [f"{what}: {', '.join(names)}" for what, names in problems.items() if names]
            raise ArchitectureError(
                f"Architecture of model_type {self.model_type!r}: fields and implied values must give every "
                f"number of DecoderConfig once; {'; '.join(lines)}"
            )


ROPE_KEYS = ("rope_theta", "partial_rotary_factor")

# Fields of every decoder here, with the values new models get where one is usual.
COMMON = (
    Field(name="vocab_size"),
    Field(name="hidden_size"),
    Field(name="num_hidden_layers"),
    Field(name="num_attention_heads"),
    Field(name="num_key_value_heads"),
    Field(name="max_position_embeddings", new=4096),
    Field(name="initializer_range", absent=0.02, new=0.02),
    Field(name="rope_scaling", absent=None, new=None),
)
UNIVERSALLY_EXPECTED = {"hidden_act": "silu", "attention_dropout": 0.0}
# Values of a decoder without experts.
DENSE = {
    "first_k_dense_replace": lambda values, _: values["num_hidden_layers"],
    "moe_intermediate_size": 0,
    "n_routed_experts": 0,
    "num_experts_per_tok": 0,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "correction_bias": False,
}


def examine(architecture: Architecture, name: str, hf_config: Json) -> tuple[DecoderConfig | None, list[str]]:
    """The decoder that a config.json describes, and its problems; None if a field is missing.

    name: of the architecture, as the decoder keeps it.
    """
    given = _flatten_rope(hf_config)
    values: dict[str, Any] = {}
    missing = []
    for item in architecture.fields:
        found = next((given[key] for key in item.spellings if given.get(key) is not None), item.absent)
        if callable(found):
            found = found(given) if not missing else 0
        if found is REQUIRED:
            missing.append(item.spellings[0])
        values[item.name] = found
    problems = _unsupported(architecture, hf_config) + architecture.refusals(hf_config)
    if missing:
        where = f"config.json of model_type {architecture.model_type!r}"
        return None, [f"{where}: missing {', '.join(missing)}; all are needed", *problems]
    decoder = complete(architecture, name, values, hf_config)
    return decoder, problems + decoder.problems()


def complete(architecture: Architecture, name: str, values: Json, source: Json) -> DecoderConfig:
    """`values` of the architecture's fields, with what it implies. `source` is what they were read from."""
    implied = {
        key: value(values, source) if callable(value) else value
        for key, value in architecture.implied.items()
    }
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping):  # one that is not implemented is among the problems already
        values = {**values, "rope_scaling": None if rope.problems("", scaling) else RopeScaling.of(scaling)}
    return DecoderConfig(architecture=name, **{**values, **implied})


def write(architecture: Architecture, config: DecoderConfig) -> dict[str, Any]:
    """config.json as transformers 5 and vLLM load it."""
    rotary = {item.name: getattr(config, item.name) for item in architecture.fields if item.name in ROPE_KEYS}
    scaling = {"rope_type": "default"} if config.rope_scaling is None else config.rope_scaling.to_json()
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **{
            item.spellings[0]: getattr(config, item.name)
            for item in architecture.fields
            if item.name != "rope_scaling"
        },
        **{k: v(config) if callable(v) else v for k, v in architecture.written.items()},
        "rope_parameters": {**scaling, **rotary},
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "bfloat16",
    }


def _flatten_rope(hf_config: Json) -> dict[str, Any]:
    """transformers 5 keeps rotary settings in `rope_parameters`, older files at the top and in
    `rope_scaling`.
    """
    found = dict(hf_config)
    for settings in (hf_config.get("rope_scaling") or {}, hf_config.get("rope_parameters") or {}):
        found |= {key: settings[key] for key in ROPE_KEYS if settings.get(key) is not None}
        if settings.get("rope_type", settings.get("type", "default")) != "default":
            # transformers takes the longest context where a file does not say what it was stretched from.
            original = hf_config.get(
                "original_max_position_embeddings", hf_config.get("max_position_embeddings")
            )
            found["rope_scaling"] = {"original_max_position_embeddings": original, **settings}
    return found


def _unsupported(architecture: Architecture, hf_config: Json) -> list[str]:
    expected = {"model_type": architecture.model_type, **UNIVERSALLY_EXPECTED, **architecture.expected}
    found = [
        f"{name}: {hf_config[name]!r} is not supported, expected {value!r}"
        for name, value in expected.items()
        if hf_config.get(name) is not None and hf_config[name] != value
    ]
    flat = _flatten_rope(hf_config)
    for key in ("rope_parameters", "rope_scaling"):
        settings = hf_config.get(key) or {}
        found += rope.problems(key, {**(flat.get("rope_scaling") or {}), **settings} if settings else {})
        for name in ROPE_KEYS:
            top, inner = hf_config.get(name), settings.get(name)
            if top is not None and inner is not None and top != inner:
                found.append(f"{name}: {top} differs from {key}.{name}, {inner}")
    return found
