"""What several files of this folder need."""

import pytest
from workers.objectives import make_batch, plain_model


@pytest.fixture(scope="module")
def batch(tiny_model):
    batch = make_batch(plain_model(tiny_model))
    return batch.map(lambda _, x: x.float() if x.is_floating_point() else x)
