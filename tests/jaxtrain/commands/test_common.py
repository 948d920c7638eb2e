"""How a command ends: an expected error shows its message, a bug its traceback."""

from __future__ import annotations

import pytest
import typer

from jaxtrain.commands.common import FAILED, naming
from jaxtrain.huggingface.reading import TruncatedError
from rollout_bridge.store import StoreError
from sharding.errors import ShardingError


@pytest.mark.parametrize("error", [StoreError, TruncatedError, ShardingError])
def test_an_expected_error_ends_with_its_name_and_message(
    error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, naming(ShardingError):
        raise error("gs://runs: no such bucket; create it")
    assert ended.value.exit_code == FAILED
    assert capsys.readouterr().err == f"{error.__name__}: gs://runs: no such bucket; create it\n"


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), ShardingError("x")])
def test_another_error_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), naming():
        raise error
