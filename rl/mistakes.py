"""How a script ends that cannot begin. One rank prints one sentence."""

import json
import linecache
import os
import sys
import time
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

from rl import stop
from rl.console import say

MISTAKES = (ValueError, OSError, RuntimeError)
PATIENCE_S = 30.0  # for which other ranks wait until the first rank of their machine has ended, which may be slower


def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType) -> None:
    """`sys.excepthook` of a script: prints one sentence for a mistake of the user, and the traceback for a bug.

    A mistake is a ValueError, OSError or RuntimeError that a `raise` statement of this repository has raised before the
    first step. What the interpreter or another library raises is a bug. Under torchrun the first rank of each machine
    prints the sentence at once, and torchrun repeats it at the end of its own report. The sentence
    of a RuntimeError has its cause too.
    """
    *_, (frame, number) = walk_tb(traceback)
    is_ours = frame.f_globals.get("__name__", "").partition(".")[0] in ("rl", "extras", "__main__")
    is_raised = linecache.getline(frame.f_code.co_filename, number).lstrip().startswith("raise ")
    if stop.is_armed() or not (is_ours and is_raised and isinstance(error, MISTAKES)):
        sys.__excepthook__(kind, error, traceback)
        return
    why = f" ({error.__cause__!r})" if isinstance(error, RuntimeError) and error.__cause__ else ""
    said = f"{Path(sys.argv[0]).name}: error: {error}{why}"
    tell_once(said)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": {"message": said, "extraInfo": {"timestamp": int(time.time())}}}))


def tell_once(text: str) -> None:
    """Print a text, if it is not empty, before this process ends. The first rank of a machine prints it at once.
    Another rank waits, since torchrun ends it as soon as the first one has ended. If nobody has ended it after half a
    minute, it is the only one that has met the mistake, and prints the text too.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE_S)
    if text:
        say(text, sys.stderr)
