"""What is published is what the host quantiser says, at every version, however the reader follows."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rollout_bridge.quantization.host import NonFiniteError
from rollout_bridge.weights.manifest import Kind
from rollout_bridge.weights.publisher import Compaction
from tests.rollout_bridge.weights import tiny


def test_every_version_of_a_chain_arrives_bit_for_bit(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store, full_every=4)
    assert trainer.take_over().version == 0
    reader = tiny.subscriber(store, tmp_path / "each")
    lagging = tiny.subscriber(store, tmp_path / "lagging")
    tree = tiny.params()
    kinds = []
    for number in range(1, 8):
        tree = tiny.step(tree, number)
        manifest = trainer.publish(tiny.on_device(tree), step=10 * number).result(60)
        assert (manifest.version, manifest.step) == (number, 10 * number)
        kinds.append(manifest.kind)
        update = reader.advance()
        assert update is not None and (update.version, update.step) == (number, 10 * number)
        tiny.assert_holds(reader, tree)
        assert reader.mirror.verify() == update.verified == len(manifest.tensors)
        assert reader.advance() is None
        if number in (3, 7):  # folds 2..3 into one update; then 5 full, 6..7 on top
            folded = lagging.advance()
            assert folded is not None and folded.version == number
            tiny.assert_holds(lagging, tree)
        elif number == 1:
            lagging.advance()
    assert kinds == [Kind.FULL] + 3 * [Kind.DELTA] + [Kind.FULL] + 2 * [Kind.DELTA]
    trainer.close()
