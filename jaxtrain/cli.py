"""The `jaxtrain` command. Each subcommand is a file in `jaxtrain.commands`; this one only lists them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from jaxtrain.commands.export import export
from jaxtrain.commands.import_ import import_
from jaxtrain.commands.inspect import inspect
from jaxtrain.commands.inspect_model import inspect_model
from jaxtrain.commands.inspect_run import inspect_run
from jaxtrain.commands.inspect_weights import inspect_weights
from jaxtrain.commands.large_pages import use_large_pages
from jaxtrain.commands.quickstart import quickstart
from jaxtrain.commands.report import report
from jaxtrain.commands.rollout import rollout
from jaxtrain.commands.serve import serve
from jaxtrain.commands.train import train


class _ConfigUnlessNamed(TyperGroup):
    """`inspect --config FILE` is that of `config`, `inspect DIRECTORY` that of `run`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        directory = args and not args[0].startswith("-") and "=" not in args[0]
        return super().parse_args(ctx, args if named else ["run" if directory else "config", *args])


inspection = typer.Typer(
    cls=_ConfigUnlessNamed,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Show an experiment's config (`inspect --config FILE`), the state of a run (`inspect runs/NAME`), a "
        "model's size, or what a store holds."
    ),
)
inspection.command("config")(inspect)
inspection.command("run")(inspect_run)
inspection.command("model")(inspect_model)
inspection.command("weights")(inspect_weights)

app = typer.Typer(
    name="jaxtrain",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Train mixture-of-experts language models in JAX with asynchronous reinforcement learning.\n\n"
        "A trainer publishes each policy version as an FP8 delta to a store; rollout workers pull it, "
        "generate, score, and append trajectories that the trainer learns from.\n\n"
        "New here? Run: jaxtrain quickstart"
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"jaxtrain {version('jaxtrain')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""


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
