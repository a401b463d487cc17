"""`python -m extras.samplers`: a process that samples for a run of train_async.py. sampler.py says how."""

import sys

from extras.samplers.sampler import run
from rl.mistakes import explain

if __name__ == "__main__":
    sys.argv[0] = "extras.samplers"  # its name in messages
    sys.excepthook = explain
    run()
