"""Programs of a loss: what they refuse before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest

from jaxtrain.config.errors import ConfigError
from jaxtrain.losses.next_token import NextToken
from jaxtrain.training.step import StepMetrics
from tests.jaxtrain.training import markov


@dataclass(frozen=True)
class Renamed:
    """Next-token prediction whose metric has another name."""

    metric: str
    columns = ()

    def __call__(self, definition, params, batch):
        sums = NextToken()(definition, params, batch)
        return replace(sums, metrics={self.metric: sums.metrics["entropy"]})


@pytest.mark.parametrize("name", ["update_rms", "loss", "max_logit"])
def test_a_metric_of_a_loss_has_no_name_of_the_steps_own(name):
    """Else it would take the place of the step's value in the metrics, measured or not."""
    assert name in {field.name for field in fields(StepMetrics)}
    with pytest.raises(ConfigError, match=rf"loss Renamed: metrics \['{name}'\] are the step's own; rename"):
        markov.compiled(Renamed(name))
    markov.compiled(Renamed(f"{name}_of_mine"))
