"""The `jaxtrain` command. Each subcommand is a file in `jaxtrain.commands`; this one only lists them."""

from __future__ import annotations

import sys

import typer
from typer.core import TyperGroup

from jaxtrain.commands.export import export
from jaxtrain.commands.import_ import import_
from jaxtrain.commands.inspect import inspect
from jaxtrain.commands.inspect_model import inspect_model
from jaxtrain.commands.inspect_weights import inspect_weights
from jaxtrain.commands.large_pages import use_large_pages
from jaxtrain.commands.quickstart import quickstart
from jaxtrain.commands.report import report
from jaxtrain.commands.rollout import rollout
from jaxtrain.commands.serve import serve
from jaxtrain.commands.train import train


class _ConfigUnlessNamed(TyperGroup):
    """`inspect --config ...` is `inspect config --config ...`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["config", *args])


inspection = typer.Typer(
    cls=_ConfigUnlessNamed,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Show an experiment's config (`inspect --config FILE`), a model's size, or what a store holds.",
)
inspection.command("config")(inspect)
inspection.command("model")(inspect_model)
inspection.command("weights")(inspect_weights)

app = typer.Typer(
    name="jaxtrain",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Train mixture-of-experts language models in JAX with asynchronous reinforcement learning.\n\n"
        "A trainer publishes each policy version as an FP8 delta to a store; rollout workers pull it, "
        "generate, score, and append trajectories that the trainer learns from.\n\n"
        "New here? Run: jaxtrain quickstart"
    ),
)
app.command()(quickstart)
app.command()(train)
app.command()(rollout)
app.command()(serve)
app.command()(report)
app.command("import")(import_)
app.command()(export)
app.add_typer(inspection, name="inspect")


def main() -> None:
    if sys.argv[1:2] in (["train"], ["rollout"]):  # those that compute
        use_large_pages()
    app()
