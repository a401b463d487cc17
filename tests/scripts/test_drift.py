"""Scripts repeat each other on purpose, so that a diff of two of them shows the algorithm; nothing else may differ.

The rule: in every section, two scripts differ by exactly the numbers of lines written down here. Who mends a line that
they share, in one of them only, changes these numbers.
"""

import difflib
import re
from collections import Counter

import pytest
from launch import ROOT

# First lines of sections. Phases 1 to 3 of RL scripts are one, "step", since DAPO repeats them in a loop of its own.
MARKS = r"import (math)$|(ADVANTAGES|PAIRS|DISTANCES) = |@(dataclass)|def (\w+)\(|    for (step) in "
MARKS += r"| +# ([4-9])\. |    run\.(close)\("
OWN = {"header", "ADVANTAGES", "PAIRS", "DISTANCES", "learn_rewards", "6"}  # each script's own
LINES = {  # section -> how many lines only the first script of a pair has there, and how many only the second
    ("train_grpo", "train_ppo"): {
        "math": (4, 5),
        "dataclass": (16, 20),
        "validate": (7, 2),
        "main": (5, 11),
        "step": (2, 3),
        "4": (1, 1),
        "5": (3, 5),
        "7": (13, 34),
        "8": (5, 5),
        "9": (1, 1),
        "close": (0, 0),
    },
    ("train_grpo", "train_dapo"): {
        "math": (4, 14),
        "dataclass": (28, 22),
        "validate": (7, 7),
        "main": (6, 12),
        "step": (8, 28),
        "4": (1, 4),
        "5": (8, 2),
        "7": (11, 2),
        "8": (4, 9),
        "9": (0, 0),
        "close": (0, 0),
    },
    ("train_grpo", "train_reinforce"): {
        "math": (3, 3),
        "dataclass": (13, 9),
        "validate": (7, 2),
        "main": (1, 3),
        "step": (3, 9),
        "4": (1, 2),
        "5": (1, 1),
        "7": (3, 1),
        "8": (2, 5),
        "9": (0, 0),
        "close": (0, 0),
    },
    ("train_grpo", "train_dpo"): {
        "math": (6, 5),
        "dataclass": (33, 14),
        "validate": (7, 14),
        "main": (9, 9),
        "step": (7, 6),
        "4": (4, 11),
        "5": (7, 1),
        "7": (28, 13),
        "8": (8, 5),
        "9": (0, 0),
        "close": (0, 0),
    },
    ("train_grpo", "train_distill"): {
        "math": (4, 5),
        "dataclass": (25, 17),
        "validate": (7, 22),
        "main": (5, 6),
        "step": (1, 1),
        "4": (1, 1),
        "5": (6, 4),
        "7": (13, 9),
        "8": (3, 1),
        "9": (0, 0),
        "close": (0, 0),
    },
    ("train_grpo", "train_prime"): {
        "math": (7, 8),
        "dataclass": (29, 19),
        "validate": (7, 6),
        "main": (9, 16),
        "step": (6, 6),
        "4": (1, 10),
        "5": (6, 10),
        "7": (18, 8),
        "8": (8, 11),
        "9": (0, 0),
        "close": (0, 0),
    },
    ("sft", "train_reward"): {
        "math": (3, 2),
        "dataclass": (10, 11),
        "encode": (10, 16),
        "main": (10, 13),
        "step": (17, 25),
        "4": (3, 4),
        "close": (0, 0),
    },
}
REARRANGED = {("train_dapo", "step")}  # pushes the weights before phase 1


def sections(text: str) -> dict[str, list[str]]:
    """The lines of a script by section, without indentation and blank lines."""
    result, name = {"header": []}, "header"
    for line in text.splitlines():
        if found := re.match(MARKS, line):
            name = next(filter(None, found.groups()))
            assert name not in result, f"two sections are called {name!r}"
            result[name] = []
        result[name] += [line.strip()] if line.strip() else []
    return result


def own_lines(left: list[str], right: list[str]) -> tuple[int, int]:
    """How many lines only the left side has, and how many only the right one; two of a kind are two."""
    return (Counter(left) - Counter(right)).total(), (Counter(right) - Counter(left)).total()


def same_order(left: list[str], right: list[str]) -> bool:
    """Whether the lines that each side has once stand in the same order."""
    once = {line for line in left if left.count(line) == right.count(line) == 1}
    return [line for line in left if line in once] == [line for line in right if line in once]


@pytest.mark.parametrize("pair", LINES, ids="-".join)
def test_scripts_differ_where_they_should_and_nowhere_else(pair):
    left, right = (sections((ROOT / f"{script}.py").read_text()) for script in pair)
    assert (left.keys() & right.keys()) - OWN == LINES[pair].keys() == (left.keys() | right.keys()) - OWN
    for name, written in LINES[pair].items():
        found = own_lines(left[name], right[name])
        ordered = same_order(left[name], right[name]) or (pair[1], name) in REARRANGED
        assert found == written and ordered, (
            f"{pair[0]}.py (-) and {pair[1]}.py (+) have drifted apart in {name!r}: {found}, not {written} lines of "
            f"their own, {'in the same' if ordered else 'the others in another'} order. Mended something? Mend it in "
            "both. If they are meant to differ, write that down here.\n"
            + "\n".join(difflib.unified_diff(left[name], right[name], n=0, lineterm=""))
        )


@pytest.mark.parametrize("pair", LINES, ids="-".join)
def test_what_is_mended_in_one_script_only_is_noticed(pair):
    """Each line that both have is changed, removed, added to or moved: in one script, and then in both."""
    scripts = [sections((ROOT / f"{script}.py").read_text()) for script in pair]
    for name, written in LINES[pair].items():
        left, right = scripts[0][name], scripts[1][name]
        shared = [line for line in left if left.count(line) == right.count(line) == 1]
        for line in shared:
            for mended in ([], [line + "  # mended"], [line, "mended()"]):
                one, other = ([y for x in side for y in (mended if x == line else [x])] for side in (left, right))
                assert own_lines(one, other) == written
                assert own_lines(one, right) != written != own_lines(left, other), line
        for a, b in zip(shared, shared[1:], strict=False):
            swapped = [{a: b, b: a}.get(line, line) for line in left]
            assert (pair[1], name) in REARRANGED or not (same_order(swapped, right) or same_order(right, swapped))
