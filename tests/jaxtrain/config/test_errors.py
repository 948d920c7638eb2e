"""A config that cannot be used is refused with field, value and what is allowed, before jax is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config, parse_override

MINIMAL = {
    "recipe": "async_grpo",
    "model": {"preset": "nano"},
    "batch": {"rows": 4, "sequence_length": 128},
    "warm_start": {
        "steps": 1,
        "learning_rate": {"peak": 1e-3},
        "batch": {"start_tokens": 512, "end_tokens": 512},
    },
    "rl": {"steps": 1, "learning_rate": {"peak": 1e-3}, "batch": {"start_tokens": 512, "end_tokens": 512}},
}


@pytest.fixture
def rl_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """configs/rl.yaml in the working directory, valid."""
    monkeypatch.chdir(tmp_path)
    path = Path("configs/rl.yaml")
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_the_message_in_the_style_guide(rl_yaml: Path) -> None:
    rl_yaml.write_text(yaml.safe_dump(MINIMAL | {"trajectories": {"min_fresh_fraction": 1.4}}))
    assert problems_of(rl_yaml) == ["configs/rl.yaml: trajectories.min_fresh_fraction: 1.4 is not in [0, 1]"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rl.steps=many", "rl.steps: 'many' is not a whole number in [0, inf)"),
        ("rl.steps=1.5", "rl.steps: 1.5 is not a whole number in [0, inf)"),
        ("rl.mtp_weight=-1", "rl.mtp_weight: -1 is not in [0, inf)"),
        ("rl.learning_rate.peak=.nan", "rl.learning_rate.peak: nan is not a finite number"),
        ("rollouts.workers=true", "rollouts.workers: true is not a whole number in [1, inf)"),
        ("weights.expert_parallel=1", "weights.expert_parallel: 1 is not true or false"),
        ("rollouts.engine=sglang", "rollouts.engine: 'sglang' is not one of embedded, vllm"),
        ("rollouts.server_port=70000", "rollouts.server_port: 70000 is not in [1, 65535]"),
        ("rollouts.server_args=[1]", "rollouts.server_args.0: 1 is not text"),
        (
            "rollouts.server_args=[--host=0.0.0.0]",
            "rollouts.server_args: --host=0.0.0.0 cannot be set here: the server listens on a loopback "
            "address only",
        ),
        ("store=hdfs://x", "store: hdfs://x: hdfs:// is not one of file://, gs://, s3://"),
        ("store=relative", "store: relative is relative; give an absolute path, or file:///data/run"),
        (
            "store=file://x",
            "store: file://x is relative; a file URL has an absolute path, as in file:///data/run",
        ),
        ("store=s3://", "store: s3:// names no bucket"),
        (
            "store=memory://x",
            "store: memory://x is the memory of one process; trainer and fleet are several: use file://, "
            "gs:// or s3://",
        ),
        (
            "weights.tensor_parallel=3",
            "weights.tensor_parallel: 3 does not divide the model's 4 attention heads and 2 key/value heads",
        ),
        (
            "data.path=x",
            "data: unknown key; allowed here: recipe, modules, name, seed, runs_dir, model, mesh, tokenizer, "
            "optimizer, batch, checkpoint, failure, environment, store, warm_start, rl, trajectories, "
            "rollouts, weights, evaluation, processes",
        ),
        ("trajectories.max_lga=2", "trajectories.max_lga: unknown key; did you mean 'max_lag'?"),
        ("max_lag=2", "max_lag: unknown key here; it is trajectories.max_lag"),
        ("sft.steps=2", "sft: unknown key; only recipe sft reads it"),
        (
            "recipe=ppo",
            "recipe: recipe 'ppo' is unknown. Known: async_grpo, sft. Write one of your own as module:Name, "
            "where the module is a file beside the config file or is installed",
        ),
        (
            "model.preset=glm",
            "model.preset: 'glm' is not one of nano, glm4_5_355b, glm4_5_air, qwen3_30b_a3b, smollm2_135m, "
            "tiny_qwen3_moe, tiny_qwen3, tiny_llama, glm-4.5, glm-4.5-air, qwen3-30b-a3b, smollm2-135m; "
            "did you mean 'glm-4.5'?",
        ),
        (
            "model.architecture=gpt2",
            "model.architecture: architecture 'gpt2' is unknown. Known: glm4_moe, llama, qwen3, qwen3_moe. "
            "Write one of your own as module:Name, where the module is a file beside the config file or is "
            "installed",
        ),
        (
            "model={preset: smollm2_135m, n_shared_experts: 1, n_routed_experts: 8}",
            "model.n_routed_experts: architecture 'llama' does not read it; leave out n_routed_experts, "
            "n_shared_experts",
        ),
        (
            "model={preset: tiny_qwen3_moe, n_routed_experts: null, num_experts_per_tok: null}",
            "model.n_routed_experts: missing; architecture 'qwen3_moe' needs n_routed_experts, "
            "num_experts_per_tok",
        ),
        ("environment=[]", "environment: [] is not a mapping"),
        ("environment.name=3", "environment.name: 3 is not text"),
        ("model.num_key_value_heads=3", "model.num_key_value_heads: 3 does not divide num_attention_heads 4"),
        (
            "model={preset: nano, attention_implementation: cudnn, compute_dtype: float32}",
            "model.attention_implementation: cudnn has no float32, and compute_dtype is float32; set "
            "compute_dtype: bfloat16, or choose auto, xla or chunked",
        ),
        ("model.num_experts_per_tok=9", "model.num_experts_per_tok: 9 is more than n_routed_experts 8"),
        (
            "mesh.ici.data=-1",
            "mesh.ici.fsdp: -1 as well as data; one axis at most takes the remaining devices",
        ),
        ("mesh.ici.data=0", "mesh.ici.data: 0 is neither a positive size nor -1 (the remaining devices)"),
        ("rl.batch.start_tokens=600", "rl.batch.start_tokens: 600 is more than end_tokens 512"),
        (
            "rl.learning_rate.kind=cosine",
            "rl.learning_rate.total_tokens: missing; kind cosine reaches `final` there",
        ),
        (
            "rollouts.max_tokens=128",
            "rollouts.max_tokens: 128 leaves no room for a prompt in batch.sequence_length 128",
        ),
        (
            "weights.publish_every=10",
            "weights.publish_every: 10 is more than trajectories.max_lag 8 + 1: before the next version no "
            "token would be fresh",
        ),
        (
            "rollouts={servers: 2, servers_at_once: 2}",
            "rollouts.servers_at_once: 2 of rollouts.servers 2 would stop the whole fleet; it must be fewer "
            "than all",
        ),
        (
            "batch.sequence_length=1024",
            "batch.sequence_length: 1024 is more than model.max_position_embeddings 512",
        ),
        ("name=../x", "name: '../x' does not match ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    ],
)
def test_one_wrong_value(rl_yaml: Path, override: str, problem: str) -> None:
    [found] = problems_of(rl_yaml, override)
    where, _, rest = found.partition(": ")
    assert rest == problem
    assert where in ("command line", "configs/rl.yaml")


def test_every_problem_at_once_each_with_its_source(rl_yaml: Path) -> None:
    rl_yaml.write_text(yaml.safe_dump(MINIMAL | {"seed": -1, "optimiser": {}}))
    assert sorted(problems_of(rl_yaml, "rl.steps=-1")) == [
        "command line: rl.steps: -1 is not in [0, inf)",
        "configs/rl.yaml: optimiser: unknown key; did you mean 'optimizer'?",
        "configs/rl.yaml: seed: -1 is not in [0, inf)",
    ]


def test_a_required_section_says_what_it_is_for(rl_yaml: Path) -> None:
    rl_yaml.write_text(yaml.safe_dump({k: v for k, v in MINIMAL.items() if k != "batch"}))
    assert problems_of(rl_yaml) == [
        "configs/rl.yaml: batch: missing; a value is required (shape of one microbatch)"
    ]


def test_a_missing_file_names_its_neighbour(rl_yaml: Path) -> None:
    assert problems_of(Path("configs/rll.yaml")) == [
        "configs/rll.yaml: no such file; did you mean configs/rl.yaml?"
    ]


def test_a_key_given_twice_is_refused(rl_yaml: Path) -> None:
    rl_yaml.write_text("recipe: sft\nseed: 1\nseed: 2\n")
    assert problems_of(rl_yaml) == ["configs/rl.yaml: not YAML: line 3, column 1: key 'seed' is given twice"]


@pytest.mark.parametrize("text", ["rl.steps", "=3", "rl..steps=3"])
def test_an_override_without_a_field_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an override; write field=value"):
        parse_override(text)


def test_an_override_through_a_scalar_is_refused(rl_yaml: Path) -> None:
    rl_yaml.write_text(yaml.safe_dump(MINIMAL | {"name": "run"}))
    assert problems_of(rl_yaml, "name.x=1") == ["command line: name.x=1: name is 'run', not a section"]


def test_checking_a_config_imports_no_accelerator_library(rl_yaml: Path) -> None:
    program = (
        "import sys; from jaxtrain.config.load import load_config; load_config(sys.argv[1]);"
        "print([m for m in ('jax', 'transformers', 'torch', 'flax') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", program, str(rl_yaml.absolute())],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("mesh.ici={data: 2, fsdp: 4}", "batch.rows: 4 is not a multiple of 8, the mesh's data 2 * fsdp 4"),
        ("mesh={ici: {expert: 4}, dcn: {data: 2}}", "batch.rows: 4 is not a multiple of 8"),
        ("mesh.ici.context=96", "batch.sequence_length: 128 is not a multiple of 192: each of the mesh's 96"),
        ("mesh={ici: {expert: 3}}", "mesh.ici.expert: 3 groups do not divide model.n_routed_experts 8"),
        ("mesh.ici.tensor=3", "mesh.ici.tensor: 3 parts do not divide model.num_key_value_heads"),
        (
            "warm_start.stages=[{tokens: 0, rows: 4, sequence_length: 128}, "
            "{tokens: 9, rows: 6, sequence_length: 64}]",
            "warm_start.stages.1.rows: 6 is not a multiple of 4",
        ),
    ],
)
def test_what_does_not_divide_among_the_devices(rl_yaml: Path, override: str, problem: str) -> None:
    """A batch that the devices cannot share evenly was once found by the first step's compiler."""
    overrides = [override, *(["mesh.ici.fsdp=4"] if override.startswith("warm") else [])]
    if "expert: 3" in override:
        overrides.append("batch.rows=3")
    assert problem in problems_of(rl_yaml, *overrides)[0]
