"""`jaxtrain inspect weights` prints what the library found; its status says whether the chain is whole."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jaxtrain.cli import app
from tests.rollout_bridge.weights import tiny


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    store = tiny.open_store(f"{tmp_path_factory.mktemp('inspect')}/store")
    trainer = tiny.publisher(store)
    trainer.take_over()
    tree = tiny.params()
    for number in (1, 2):
        tree = tiny.step(tree, number)
        trainer.publish(tiny.on_device(tree), step=number).result()
    trainer.close()
    return store.url


def test_a_whole_chain(url: str) -> None:
    result = CliRunner().invoke(app, ["inspect", "weights", url, "--verify"])
    assert result.exit_code == 0, result.output
    for part in ("head: version 2", "routed experts", "replayed 2 versions", "the chain is whole"):
        assert part in result.output
    found = json.loads(CliRunner().invoke(app, ["inspect", "weights", url, "--json"]).output)
    assert [row["kind"] for row in found["versions"]] == ["full", "delta"] and found["verified"] is None


def test_a_broken_chain_and_a_wrong_place(url: str, tmp_path) -> None:
    store = tiny.open_store(url.removeprefix("file://").rstrip("/"))
    blob = next(key for key in store.list("weights/versions/00000002/") if key.endswith(".blob"))
    store.delete(blob)
    result = CliRunner().invoke(app, ["inspect", "weights", url, "--verify"])
    assert result.exit_code == 1 and "the chain is broken" in result.output and "missing" in result.output
    result = CliRunner().invoke(app, ["inspect", "weights", str(tmp_path / "none" / "store")])
    assert result.exit_code == 1
