"""The `jaxtrain` command. Each subcommand is a file in `jaxtrain.commands`; this one only lists them."""

from __future__ import annotations

import typer

from jaxtrain.commands.export import export
from jaxtrain.commands.import_ import import_
from jaxtrain.commands.inspect import inspect
from jaxtrain.commands.quickstart import quickstart
from jaxtrain.commands.report import report
from jaxtrain.commands.rollout import rollout
from jaxtrain.commands.serve import serve
from jaxtrain.commands.train import train

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
app.command()(inspect)


def main() -> None:
    app()
