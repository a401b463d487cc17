"""`python -m rl.sampler`: a process that samples for a run of train_async.py. rl/sampling/sampler.py says how."""

import tyro

from rl.sampling.sampler import Args, sample_for


def run() -> None:
    """Sample as the command line says."""
    sample_for(tyro.cli(Args))


if __name__ == "__main__":
    run()
