"""Initial parameters have the deviation that the configuration gives, whatever they are a part of."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import initialize
from tests.jaxtrain.models.tiny import HF_CONFIG


def test_matrices_are_normal_with_initializer_range_norms_are_1_and_biases_0():
    """The deviation of n numbers is off by 1 / sqrt(2 n): 2 % of the smallest matrix's 1024, so 10 % is 4
    deviations."""
    config = ModelConfig.from_hf(HF_CONFIG | {"initializer_range": 0.05, "num_nextn_predict_layers": 2})
    for path, value in initialize(config, seed=0).items():
        if path.endswith("norm"):
            np.testing.assert_array_equal(value, 1, err_msg=path)
        elif path.endswith("bias"):
            np.testing.assert_array_equal(value, 0, err_msg=path)
        else:
            for layer, matrix in enumerate(np.asarray(value) if value.ndim > 2 else [np.asarray(value)]):
                if matrix.size >= 1024:
                    assert matrix.std() == pytest.approx(0.05, rel=0.1), (path, layer)
                assert abs(matrix.mean()) < 5 * 0.05 / matrix.size**0.5, (path, layer)
