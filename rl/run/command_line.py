"""Reading the command line of a script."""

import sys
from collections.abc import Sequence
from dataclasses import fields

import tyro

from extras.plan import exit_if_planning
from rl.console import outlive_output, say
from rl.flags import SWITCH, T, marked, spelled
from rl.ranks import die_with_launcher


def with_values(words: Sequence[str], switches: set[str]) -> list[str]:
    """The words of a command line with a value behind each of the `switches`: --x becomes --x True, and --no-x becomes
    --x False. `--x True`, `--x False` and `--x auto` stay as they are.
    """
    result = []
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        flag = word.replace("_", "-")
        value = ["True"] if flag in switches and following.startswith("-") else []
        is_off = flag.replace("--no-", "--", 1) in switches - {flag}
        result += [flag.replace("--no-", "--", 1), "False"] if is_off else [word, *value]
    return result


def parse(cls: type[T], description: str | None, *, hint: str = "") -> T:
    """The Args of a script from its command line. Under torchrun, this process dies with the launcher from here on.

    What a script leaves behind is its folder, so a closed or full stdout does not change its exit code. `hint` is
    printed after the error if the command line has a flag that the script does not have, or a value that is none. With
    --plan the process ends here, see extras/plan/.
    """
    die_with_launcher()
    if "checkpoints" in {field.name for field in fields(cls)}:
        outlive_output()
    try:
        words = with_values(sys.argv[1:], {spelled(name) for name in marked(cls(), SWITCH)})
        return exit_if_planning(tyro.cli(cls, args=words, description=description, config=(tyro.conf.OmitArgPrefixes,)))
    except SystemExit as end:
        if end.code == 2 and hint:  # tyro has refused the command line
            say(hint, sys.stderr)
        raise
