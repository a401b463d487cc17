"""Imported first by the process that forks others, and by conftest.py, as frozen.py is last.

No garbage collections happen between these two. They would walk again and again through a million objects of imported
modules, of which all stay.
"""

import gc

gc.disable()
