"""Imported last by the process that forks others, see `launch.PRELOADED`, and by conftest.py when all is collected.

What it has imported stays for good. A garbage collection of a fork need not walk through it, which takes half a second.
"""

import gc
import sys

import launch
from transformers import PreTrainedConfig

# transformers makes a config's text for a message that nobody reads, at each of a run's dozen loads of it.
PreTrainedConfig.__repr__ = object.__repr__

if "vllm.model_executor.models.registry" in sys.modules:
    launch.look_at_classes_here()

gc.collect()
gc.freeze()
gc.enable()  # see uncollected.py
