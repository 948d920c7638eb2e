"""A decoder's structure without its parameters, and random initial parameters.

Parameters are a flat mapping from path to array ("moe/attention/q_proj/kernel"). Optimizer rules,
checkpoints, sharding tables and the weight chain use the same paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.parameters import Buffer
from jaxtrain.models.placement import spans_devices

Params = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Definition:
    """The structure of a decoder, without its parameters.

    shapes: path -> shape of every parameter and buffer; axes: path -> logical axis names, one a dimension.
    buffers: paths that have no gradient. mesh: the devices of a bound module, if several.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    shapes: dict[str, jax.ShapeDtypeStruct]
    axes: dict[str, tuple[str | None, ...]]
    buffers: frozenset[str]
    mesh: Mesh | None = None

    def on(self, mesh: Mesh) -> Definition:
        """The same decoder for arrays on `mesh`: attention and experts run on each device's own part."""
        return replace(self, mesh=mesh if spans_devices(mesh) else None)

    def bind(self, params: Params) -> Decoder:
        """The module holding `params`; works on tracers, so call it inside jit."""
        missing = self.shapes.keys() - params.keys()
        if missing:
            raise KeyError(f"parameters missing: {sorted(missing)}")
        flat: dict[tuple[Any, ...], nnx.Variable] = {
            tuple(path.split("/")): (Buffer if path in self.buffers else nnx.Param)(params[path])
            for path in self.shapes
        }
        model = nnx.merge(self.graphdef, nnx.from_flat_state(flat))
        for _, module in nnx.iter_modules(model):
            if hasattr(module, "mesh"):
                cast(Any, module).mesh = self.mesh
        return model

    def head(self, params: Params) -> jax.Array:
        """The output projection [D, V]; of tied models the word embedding, transposed."""
        return params["embedding"].T if self.config.tie_word_embeddings else params["lm_head/kernel"]


@lru_cache(maxsize=8)
def define(config: ModelConfig) -> Definition:
    """Shapes and logical axes by shape evaluation; allocates nothing."""
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    flat = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    return Definition(
        config=config,
        graphdef=graphdef,
        shapes={
            path: jax.ShapeDtypeStruct(v.get_value().shape, v.get_value().dtype) for path, v in flat.items()
        },
        axes={path: v.get_metadata()["logical_axes"] for path, v in flat.items()},
        buffers=frozenset(path for path, v in flat.items() if isinstance(v, Buffer)),
    )


@partial(jax.jit, static_argnums=0)
def _initialize(config: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
    model = Decoder(config, rngs=nnx.Rngs(params=key))
    return {"/".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(model))}


def initialize(
    config: ModelConfig, *, seed: int, shardings: Mapping[str, jax.sharding.Sharding] | None = None
) -> dict[str, jax.Array]:
    """Random parameters, created where `shardings` places them.

    The same seed gives the same numbers on any mesh.
    """
    key = jax.random.key(seed)
    if shardings is None:
        return _initialize(config, key)
    out = {path: shardings[path] for path in define(config).shapes}
    return jax.jit(_initialize, static_argnums=0, out_shardings=out)(config, key)
