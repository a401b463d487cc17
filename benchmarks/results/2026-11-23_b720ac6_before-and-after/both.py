"""both.py CHECKOUT VOCABULARY MEAN EOS FLAGS: step_time.py, with ragged lengths from its fourth step on."""

import os
import sys
from dataclasses import replace

root, vocabulary, mean, eos = sys.argv[1:5]
del sys.argv[1:5]
sys.path[0] = root
os.chdir(root)
import tyro  # noqa: E402

import train_grpo  # noqa: E402
from benchmarks import step_time  # noqa: E402

FIXED, calls, whole = 3, 0, train_grpo.sample_groups
stops = tuple(step_time.geometric_stop_ids(int(vocabulary), float(mean), int(eos)))


def sample_groups(engine, rows, sampling, **others):
    """The script's own, with many stop ids after the first three calls."""
    global calls
    calls += 1
    if calls > FIXED:
        sampling = replace(sampling, stop_token_ids=stops)
    return whole(engine, rows, sampling, **others)


if __name__ == "__main__":
    train_grpo.sample_groups = sample_groups
    words = [word for word in sys.argv[1:] if word != "--"]
    parsed, others = tyro.cli(step_time.Args, args=words, return_unknown_args=True)
    step_time.main(parsed, others)
