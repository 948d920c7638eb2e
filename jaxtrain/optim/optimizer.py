"""How each parameter is optimised, and one gradient transformation for all of them."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxtrain.optim.muon import MatrixLayout, MuonConfig, layout_of, scale_by_muon

_HEAD_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Method(enum.StrEnum):
    """How a parameter is updated; `frozen` ones get zero updates and no state."""

    muon = "muon"
    adamw = "adamw"
    frozen = "frozen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (arXiv 1711.05101) for parameters that Muon does not take. GLM-4.5's numbers are unpublished.

    Attributes:
      b1, b2: decays of the averages of gradients and squared gradients; 0.95 as in Moonlight.
      eps: added to the root of the second.
      weight_decay: decoupled, multiplied by the learning rate; applied to matrices only.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of the optimizer.

    Attributes:
      muon, adamw: settings of each method.
      matrices: method of every matrix but the word embedding.
      lm_head: method of the output head; GLM-4.5 excepts only word embedding, biases and norms from Muon.
      overrides: path pattern (as in `fnmatch`) -> method; the first that matches decides, before any rule.
    """

    muon: MuonConfig = MuonConfig()
    adamw: AdamWConfig = AdamWConfig()
    matrices: Method = Method.muon
    lm_head: Method = Method.muon
    overrides: Mapping[str, Method] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The method of one parameter, and its reason.

    Attributes:
      path, shape: the parameter.
      method: how it is updated.
      weight_decay: its decay, multiplied by the learning rate.
      matrices: number of matrices Muon orthogonalises in it, 0 for other methods.
      matrix: rows and columns of each, or None.
      reason: the rule that decided.
    """

    path: str
    shape: tuple[int, ...]
    method: Method
    weight_decay: float
    matrices: int
    matrix: tuple[int, int] | None
    reason: str


class OptimizerState(NamedTuple):
    """State of both methods, each by parameter path: a `MuonState` and an `optax.ScaleByAdamState`."""

    muon: optax.OptState
    adamw: optax.OptState


def select(config: OptimizerConfig, params: Mapping[str, Any]) -> dict[str, Choice]:
    """Decides the method of every parameter from its path; not from its rank, since biases are stacked.

    Args:
      params: flat dict of path -> array or ShapeDtypeStruct.

    Raises:
      ValueError: a path that no rule knows, a vector that an override gives to Muon, or an override that
        names no parameter.
    """
    for pattern in config.overrides:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in params):
            raise ValueError(
                f"optimizer.overrides: {pattern!r} matches no parameter; the paths are {', '.join(params)}"
            )
    return {path: _choose(config, path, leaf) for path, leaf in params.items()}


def muon_layouts(config: OptimizerConfig, params: Mapping[str, Any]) -> dict[str, MatrixLayout]:
    """The layout of each parameter that Muon takes. Raises as `select` does."""
    return {
        path: layout_of(params[path], head_width=_head_width(config.muon, path))
        for path, choice in select(config, params).items()
        if choice.method is Method.muon
    }


def build(config: OptimizerConfig, params: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns the transformation of gradients to updates at learning rate 1, weight decay included.

    The step applies params + learning_rate * updates. `params` gives paths, shapes and shardings; only leaves
    with a NamedSharding are treated as distributed. Gradients, parameters and updates are flat dicts of path
    -> array; updates have the gradients' dtype, state is float32 except Muon's `momentum_dtype`.
    """
    choices = select(config, params)
    layouts = muon_layouts(config, params)
    adamw_paths = [path for path, choice in choices.items() if choice.method is Method.adamw]
    muon = scale_by_muon(config.muon, layouts)
    adam = optax.scale_by_adam(b1=config.adamw.b1, b2=config.adamw.b2, eps=config.adamw.eps)

    def float32(tree: Mapping[str, Array]) -> dict[str, Array]:
        return {path: tree[path].astype(jnp.float32) for path in adamw_paths}

    def init(params: Any) -> OptimizerState:
        zeros = {path: jnp.zeros_like(params[path], dtype=jnp.float32) for path in adamw_paths}
        return OptimizerState(muon.init(params), adam.init(zeros))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OptimizerState]:
        if params is None:
            raise ValueError(
                "optimizer.update: params is None; weight decay needs update(gradients, state, params)"
            )
        by_method: list[Any] = [muon.update(updates, state.muon), adam.update(float32(updates), state.adamw)]
        (muon_directions, muon_state), (adam_directions, adam_state) = by_method
        directions: dict[str, Array] = {**muon_directions, **adam_directions}
        result = {}
        for path, gradient in updates.items():
            choice = choices[path]
            if choice.method is Method.frozen:
                result[path] = jnp.zeros_like(gradient)
                continue
            direction = directions[path].astype(jnp.float32)
            if choice.weight_decay:
                direction = direction + choice.weight_decay * params[path].astype(jnp.float32)
            result[path] = (-direction).astype(gradient.dtype)
        return result, OptimizerState(muon_state, adam_state)

    return optax.GradientTransformation(init, update)


def _choose(config: OptimizerConfig, path: str, leaf: Any) -> Choice:
    method, reason, is_matrix = _rule(config, path)
    for pattern, override in config.overrides.items():
        if fnmatch.fnmatchcase(path, pattern):
            method, reason, is_matrix = Method(override), f"override {pattern}", bool(is_matrix)
            break
    if method is None:
        raise ValueError(
            f"{path}: no rule says how to optimise it; expected .../kernel, .../experts/*, embedding, "
            ".../bias or ...norm. Name it so, or add it to optimizer.overrides"
        )
    shape = tuple(leaf.shape)
    if method is not Method.muon:
        decay = config.adamw.weight_decay if method is Method.adamw and is_matrix else 0.0
        return Choice(path, shape, method, decay, 0, None, reason)
    if len(shape) < 2:
        raise ValueError(
            f"{path}: shape {shape} has no matrix for Muon; expected [..., in, out]. Use adamw for it"
        )
    layout = layout_of(leaf, head_width=_head_width(config.muon, path))
    return Choice(path, shape, method, config.muon.weight_decay, layout.count, layout.matrix, reason)


def _rule(config: OptimizerConfig, path: str) -> tuple[Method | None, str, bool]:
    """Returns method (None if no rule knows the path), the rule's name, and whether it is a matrix."""
    *parents, name = path.split("/")
    if name == "correction_bias":
        return Method.frozen, "router correction bias has its own rule", False
    if name == "bias":
        return Method.adamw, "bias", False
    if name.endswith("norm"):
        return Method.adamw, "norm weight", False
    if name == "embedding":
        return Method.adamw, "word embedding", True
    if "lm_head" in parents and name == "kernel":
        return Method(config.lm_head), "output head", True
    if name == "kernel" or (parents and parents[-1] == "experts"):
        return Method(config.matrices), "matrix", True
    return None, "", False


def _head_width(config: MuonConfig, path: str) -> int | None:
    parts = path.split("/")
    is_head_projection = len(parts) > 1 and parts[-1] == "kernel" and parts[-2] in _HEAD_PROJECTIONS
    return config.split_heads if is_head_projection else None
