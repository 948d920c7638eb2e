"""The pages of docs/extending show the examples as they are, and what a command says of a wrong option."""

from __future__ import annotations

import re

import pytest

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from tests.extending.examples import EXAMPLES, PAGES, ROOT, jaxtrain

WHOLE = {"loss": "gspo", "advantage": "turn_discount", "filter": "too_easy", "recipe": "lines"}
CONFIGS = {"loss": "gspo", "advantage": "gspo", "filter": "gspo", "recipe": "lines", "environment": "gspo"}
CONFIGS |= {"tool_environment": "calculator"}


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def test_an_example_is_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) == 7 and max(lengths.values()) < 60, lengths


@pytest.mark.parametrize("name", WHOLE)
def test_a_page_shows_its_example_whole(name):
    assert f"```python\n{(EXAMPLES / WHOLE[name]).with_suffix('.py').read_text()}```" in page(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_page_shows_a_part_of_its_config(name):
    config = (EXAMPLES / CONFIGS[name]).with_suffix(".yaml").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page(name), re.DOTALL)
    assert blocks and blocks[0] in config


def test_the_index_names_every_page_and_example():
    index = page("README")
    for path in [*PAGES.glob("*.md"), *EXAMPLES.glob("*.py")]:
        assert path.name == "README.md" or path.relative_to(PAGES).as_posix() in index


def said(page_name: str, problem: str) -> None:
    """The page shows the problem as a command's answer."""
    assert re.search(rf"^ +\S.*: {re.escape(problem)}$", page(page_name), re.MULTILINE), problem


def test_wrong_options_are_refused_before_jax_starts():
    """With a platform that jax does not have, anything that touches a device fails in another way."""
    source = EXAMPLES / "gspo.yaml"
    wrong = [
        "rl.loss.eps_low=-1",
        "rl.advantage.per_token=1.5",
        "trajectories.filters=[{name: too_easy:TooEasy}]",
    ]
    output = jaxtrain("quickstart", "--config", source, *wrong, here=ROOT, platform="none", status=2)
    problems = [line.removeprefix("command line: ") for line in output.splitlines()]
    assert problems == [
        "rl.loss.eps_low: -1.0 is not in (0, 1]",
        "rl.advantage.per_token: 1.5 is not in (0, 1]",
        "trajectories.filters.0.above: missing; a value is required",
    ]
    for name, problem in zip(("loss", "advantage", "filter"), problems, strict=True):
        said(name, problem)


def test_a_wrong_source_of_a_recipe_is_refused_before_jax_starts():
    source = EXAMPLES / "lines.yaml"
    wrong = "plenty.source.path=missing.txt"
    output = jaxtrain("train", "--config", source, wrong, here=ROOT, platform="none", status=2)
    problem = "plenty.source.path: missing.txt is no file; name one, from the directory of the command"
    assert output == f"command line: {problem}\n"
    said("recipe", problem)
    with pytest.raises(ConfigError) as error:
        load_config(source, ["bettr.steps=9"])
    [found] = error.value.problems
    assert found == "command line: bettr: unknown key; did you mean 'better'?"
    said("recipe", found.removeprefix("command line: "))
