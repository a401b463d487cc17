"""What is rehearsed before a run is the largest micro-batch that the run can have."""

import pytest

from rl.batching import plan_micro_batches, shared_prefix
from rl.memory import largest_micro_batch


@pytest.mark.parametrize(
    ("max_tokens", "max_length", "lengths"),
    [
        (16384, 8320, [8320, 8064]),
        (16384, 1152, [1152] * 14 + [256]),
        (2304, 1152, [1152, 1152]),
        (2305, 1152, [1152, 1152]),  # a sequence of one token has nothing to score
        (2306, 1152, [1152, 1152, 2]),
        (100, 1152, [1152]),  # a sequence is never cut
    ],
)
def test_largest_micro_batch_fills_the_budget(max_tokens, max_length, lengths):
    batch = largest_micro_batch(max_tokens, max_length)
    assert batch.lengths.tolist() == lengths and batch.input_ids.shape == (len(lengths), max_length)
    assert batch.response_mask.sum(1).tolist() == [length - 1 for length in lengths]
    assert all(mask[1:length].all() for mask, length in zip(batch.response_mask, lengths, strict=True))
    shared = shared_prefix(batch).tolist()
    assert shared == [0] * len(lengths)
    plan = plan_micro_batches(lengths, range(len(lengths)), world_size=1, max_tokens=max_tokens, shared=shared)
    assert plan == [[list(range(len(lengths)))]]
