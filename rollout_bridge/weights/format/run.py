"""`run.json`: model, quantisation and tokenizer of a run. Created once; only the incarnation changes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_bridge import architectures
from rollout_bridge.architectures.tensors import TensorSource
from rollout_bridge.errors import ExpectedError
from rollout_bridge.quantization.plan import QuantizationPlan
from rollout_bridge.store import Store, to_json_bytes
from rollout_bridge.weights.format.canonical import TensorSpec, canonical_tensors

RUN_KEY = "run.json"
FORMAT_VERSION = 2


class RunError(ExpectedError, ValueError):
    """The store holds no run, another run, or a damaged one; the message names which and what to do."""


@dataclass(frozen=True)
class RunInfo:
    """Model, quantisation and tokenizer that every process of a run agrees on.

    hf_config: the Hugging Face config.json, without a quantization_config.
    tokenizer: file name -> text, the small files of a Hugging Face tokenizer.
    fingerprint: SHA-256 of hf_config, plan and tokenizer: with equal fingerprints the same weights are served
        in the same form, and a token id means the same text.
    """

    run_id: str
    hf_config: dict[str, Any]
    plan: QuantizationPlan
    tokenizer: dict[str, str] = field(default_factory=dict)
    incarnation: int = 0

    @classmethod
    def new(
        cls,
        hf_config: Mapping[str, Any],
        plan: QuantizationPlan,
        *,
        tokenizer: Mapping[str, str] | None = None,
    ) -> RunInfo:
        """A run with a fresh id."""
        return cls(uuid.uuid4().hex, dict(hf_config), plan, dict(tokenizer or {}))

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(
            to_json_bytes(
                {
                    "hf_config": self.hf_config,
                    "quantization_plan": self.plan.to_json(),
                    "tokenizer": self.tokenizer,
                }
            )
        ).hexdigest()

    @functools.cached_property
    def sources(self) -> tuple[TensorSource, ...]:
        """Where each Hugging Face tensor comes from in the trainer's parameters."""
        return architectures.tensors(self.hf_config)

    @functools.cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Canonical tensors of the chain, scales included."""
        return canonical_tensors(self.sources, self.plan)

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "run_id": self.run_id,
            "hf_config": self.hf_config,
            "quantization_plan": self.plan.to_json(),
            "tokenizer": self.tokenizer,
            "incarnation": self.incarnation,
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_json(cls, data: Any, *, where: str = RUN_KEY) -> RunInfo:
        """Checks every field. Raises `RunError` naming `where` and the field."""
        if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
            found = data.get("format_version") if isinstance(data, dict) else type(data).__name__
            raise RunError(f"{where}: format_version is {found!r}, this program reads {FORMAT_VERSION}")
        kinds = {"run_id": str, "hf_config": dict, "tokenizer": dict, "incarnation": int, "fingerprint": str}
        for name, kind in kinds.items():
            if not isinstance(data.get(name), kind):
                raise RunError(f"{where}: {name} is {data.get(name)!r}, expected {kind.__name__}")
        if not all(_is_file_name(k) and isinstance(v, str) for k, v in data["tokenizer"].items()):
            raise RunError(f"{where}: tokenizer maps plain file names to their text; another entry was found")
        if problems := architectures.examine(data["hf_config"])[1]:
            raise RunError(f"{where}: hf_config: {'; '.join(problems)}")
        try:
            plan = QuantizationPlan.from_json(data.get("quantization_plan") or {})
        except ValueError as error:
            raise RunError(f"{where}: quantization_plan: {error}") from error
        run = cls(data["run_id"], data["hf_config"], plan, data["tokenizer"], data["incarnation"])
        if run.fingerprint != data["fingerprint"]:
            raise RunError(
                f"{where}: fingerprint {data['fingerprint']} does not belong to its hf_config, plan and "
                f"tokenizer ({run.fingerprint}); the file was edited. Start a new run in an empty store"
            )
        return run


def load(store: Store) -> RunInfo | None:
    """The run of a store, None if it has none yet. Raises `RunError` if it is damaged."""
    data = store.read_json(RUN_KEY)
    return None if data is None else RunInfo.from_json(data, where=f"{store.url}{RUN_KEY}")


def create_or_join(store: Store, run: RunInfo) -> RunInfo:
    """Creates `run`, or joins the one that is there if model, quantisation and tokenizer are the same.

    The id and incarnation of an existing run are kept. Raises `RunError` naming what differs.
    """
    if store.create_json(RUN_KEY, run.to_json()):
        return run
    existing = load(store)
    if existing is None:
        raise RunError(f"{store.url}{RUN_KEY}: disappeared while it was being created; start again")
    if existing.fingerprint != run.fingerprint:
        raise RunError(
            f"{store.url}{RUN_KEY}: holds run {existing.run_id}, fingerprint {existing.fingerprint}; this "
            f"trainer has {run.fingerprint}: another {_difference(existing, run)}. Use that of the run, or "
            "an empty store for a new one"
        )
    return existing


def _difference(found: RunInfo, mine: RunInfo) -> str:
    """What of two runs differs, in words."""
    if found.hf_config != mine.hf_config:
        keys = found.hf_config.keys() | mine.hf_config.keys()
        different = sorted(key for key in keys if found.hf_config.get(key) != mine.hf_config.get(key))
        return f"model configuration ({', '.join(different)})"
    if found.plan != mine.plan:
        return "quantization plan"
    names = found.tokenizer.keys() | mine.tokenizer.keys()
    different = sorted(name for name in names if found.tokenizer.get(name) != mine.tokenizer.get(name))
    return f"tokenizer ({', '.join(different)})"


def move_incarnation(store: Store, incarnation: int) -> RunInfo:
    """Raises the incarnation in `run.json` to at least `incarnation`; never lowers it."""
    while True:
        data, generation = store.read_json_with_generation(RUN_KEY)
        if data is None:
            raise RunError(f"{store.url}{RUN_KEY}: missing; create the run before taking it over")
        run = RunInfo.from_json(data, where=f"{store.url}{RUN_KEY}")
        if run.incarnation >= incarnation:
            return run
        moved = dataclasses.replace(run, incarnation=incarnation)
        if store.swap_json(RUN_KEY, moved.to_json(), generation):
            return moved


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name
