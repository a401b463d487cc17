"""`python -m extras.samplers`: a process that samples for a run of train_async.py. sampler.py says how."""

from extras.samplers.sampler import run

if __name__ == "__main__":
    run()
