"""Reading the command line of a script."""

import importlib
import os
import sys
from collections.abc import Sequence

from tyro import cli, conf

from extras.plan import exit_if_planning
from rl.console import outlive_output, started
from rl.flags import SWITCH, T, marked, spelled
from rl.ranks import die_with_launcher


def with_values(words: Sequence[str], switches: set[str]) -> list[str]:
    """The words of a command line with a value after each of the `switches`: --x becomes --x True, and --no-x becomes
    --x False. `--x True`, `--x False` and `--x auto` stay as they are.
    """
    result = []
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        flag = word.replace("_", "-")
        value = ["True"] if flag in switches and following.startswith("-") else []
        is_off = flag.replace("--no-", "--", 1) in switches - {flag}
        result += [flag.replace("--no-", "--", 1), "False"] if is_off else [word, *value]
    return result


def parse(cls: type[T], doc: str | None, *, hint: str = "") -> T:
    """The Args of a script from its command line. Under torchrun, this process dies with the launcher from here on.

    --help begins with `doc`. `hint` is printed after the error if the command line has a flag that the script does not
    have, or a value that the flag cannot have. With --plan the process ends here, see extras/plan/. From here on a
    mistake of the user ends the script with one sentence, see `rl.mistakes.explain`. What a script leaves behind is its
    folder, so a closed or full stdout does not change its exit code.
    """
    die_with_launcher()
    sys.excepthook = lambda *error: importlib.import_module("rl.mistakes").explain(*error)
    if "checkpoints" in vars(cls()):
        outlive_output()
    try:
        words = with_values(sys.argv[1:], {spelled(name) for name in marked(cls(), SWITCH)})
        shown = importlib.import_module("extras.help").boxed(cls) if {"-h", "--help"} & {*words} else cls
        prints = os.environ.get("LOCAL_RANK", "0") == "0"  # of this machine, since all ranks have the same command line
        args = exit_if_planning(cli(conf.OmitArgPrefixes[shown], args=words, description=doc, console_outputs=prints))
        started("imports")
        return args
    except SystemExit as end:
        if end.code == 2:  # tyro has refused the command line
            importlib.import_module("rl.mistakes").tell_once(hint)
        raise
