"""Imported last by the process that forks others, see `launch.PRELOADED`, and by conftest.py when all is collected.

What it has imported stays for good. A garbage collection of a fork need not walk through it, which takes half a second.
"""

import gc
import sys

from transformers import PreTrainedConfig

# transformers makes a config's text for a message that nobody reads, at each of a run's dozen loads of it.
PreTrainedConfig.__repr__ = object.__repr__

# vLLM asks a new process what a model's class can do, eight seconds of a core for each class, so as not to touch a GPU.
if registry := sys.modules.get("vllm.model_executor.models.registry"):
    registry._run_in_subprocess = lambda inspect: inspect()

gc.collect()
gc.freeze()
