"""`python -m rl.sampler`: a process that samples for a run of train_async.py. rl/sampling/sampler.py says how."""

import tyro

from rl.sampling.sampler import Args, main


def run() -> None:
    """Sample as the command line says."""
    main(tyro.cli(Args))


if __name__ == "__main__":
    run()
