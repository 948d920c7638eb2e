"""`jaxtrain inspect weights`: the weight chain of a store, and whether it is whole."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from jaxtrain.commands.common import FAILED, console, naming


def inspect_weights(
    store: Annotated[
        str, typer.Argument(help="The store: a directory, file://, gs:// or s3://.", show_default=False)
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Replay the chain and check every digest.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the versions of a run: sizes, what changes where, who serves what, and whether the chain is whole.

    Reads only. The exit status is 1 if a reader could not follow the chain.
    """
    from rollout_bridge.store import Store
    from rollout_bridge.weights.read.inspection import inspect_weights as look

    with naming():
        found = look(Store.open(store, probe=False), verify=verify)
    if json:
        print(json_module.dumps(found, indent=2))
    else:
        _show(found)
    if not found["health"]["ok"]:
        raise typer.Exit(FAILED)


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from jaxtrain.quickstart.view import kilobytes

    shown, head, health = console(), found["head"], found["health"]
    shown.print(f"run {found['run']['run_id']}, incarnation {found['run']['incarnation']}, {found['url']}")
    if head is None:
        shown.print("nothing is published yet")
        return
    shown.print(f"head: version {head['version']} of step {head['step']}, owner {head['owner']}")
    versions = Table(
        "version", "step", "kind", "whole", "change", "manifest", "x entropy", "changed", title="versions"
    )
    for row in found["versions"]:
        kind = row["kind"] + ("+change" if row["kind"] == "full" and row["follows"] else "")
        versions.add_row(
            str(row["version"]),
            str(row["step"]),
            kind,
            *(
                kilobytes(row[name]) if row[name] else ""
                for name in ("full_bytes", "delta_bytes", "manifest_bytes")
            ),
            "" if row["delta_over_entropy"] is None else f"{row['delta_over_entropy']:.2f}",
            f"{row['changed_fraction']:.3%}",
        )
    shown.print(versions)
    for title, group in (("kind", "by_kind"), ("layer", "by_layer")):
        table = Table(title, "elements changed by a version")
        for name, fraction in found["sparsity"][group].items():
            table.add_row(name, f"{fraction:.3%}")
        if table.row_count:
            shown.print(table)
    agents = Table(
        "agent", "version", "behind", "seen", "pause", "updates", "errors", "last error", title="agents"
    )
    for row in found["agents"]:
        pause = "" if row["pause_ms_median"] is None else f"{row['pause_ms_median']:.0f} ms"
        values = (row["agent"], row["version"], row["behind"], f"{row['age_seconds']:.0f} s ago", pause)
        agents.add_row(*(str(value) for value in (*values, row["updates"], row["errors"], row["last_error"])))
    shown.print(agents if agents.row_count else "no agent has acknowledged a version")
    if found["verified"] is not None:
        verified = found["verified"]
        shown.print(f"replayed {verified['versions']} versions, {verified['digests']} digests checked")
    for name in health["quarantined"]:
        shown.print(f"quarantined by a reader: {name}")
    if health["beside_the_chain"]:
        shown.print(f"left by unfinished attempts, removed with old versions: {health['beside_the_chain']}")
    shown.print(
        "the chain is whole" if health["ok"] else "\n".join(["the chain is broken:", *health["problems"]])
    )
