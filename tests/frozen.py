"""Imported last by the process that forks others, see `launch.PRELOADED`.

What it has imported stays for good. A garbage collection of a fork need not walk through it, which takes half a second.
"""

import gc

gc.collect()
gc.freeze()
