"""The scripts repeat each other on purpose, so that a diff of two of them shows the algorithm; nothing else may differ.

The rule: in every section, a script differs from train_grpo.py by exactly the numbers of lines written down here. Who
mends a line that two scripts share, in one of them only, changes these numbers.
"""

import difflib
import re
from collections import Counter

import pytest
from launch import ROOT

MARKS = {  # the first line of a section; phases 1 to 3 are one, since DAPO repeats them in a loop of its own
    r"import gc$": "imports",
    r"ENGINES = ": "tables",
    r"@dataclass": "Args",
    r"def (\w+)\(": "",  # named like the function
    r"    for step in ": "rollouts",
    r" +# ([4-9])\. ": "phase ",
    r"    gc\.unfreeze\(": "closing",
}
OWN = {"", "tables", "phase 6", "group_scores", "loop_state"}  # each script's own: header, formulas, DAPO's functions
LINES = {  # section -> how many lines only train_grpo.py has there, and how many only the other script
    "train_ppo": {
        "imports": (1, 1),
        "Args": (12, 19),
        "validate": (3, 6),
        "evaluate": (0, 0),
        "main": (3, 21),
        "rollouts": (4, 12),
        "phase 4": (1, 1),
        "phase 5": (1, 5),
        "phase 7": (15, 37),
        "phase 8": (11, 16),
        "phase 9": (1, 1),
        "closing": (0, 0),
    },
    "train_dapo": {
        "imports": (0, 0),
        "Args": (21, 17),
        "validate": (3, 8),
        "evaluate": (0, 0),
        "main": (7, 18),
        "rollouts": (8, 26),
        "phase 4": (0, 2),
        "phase 5": (6, 2),
        "phase 7": (8, 5),
        "phase 8": (4, 8),
        "phase 9": (2, 2),
        "closing": (0, 0),
    },
}
REARRANGED = {("train_dapo", "rollouts"), ("train_ppo", "phase 7")}  # a loop around phases 1 to 3; two models


def sections(text: str) -> dict[str, list[str]]:
    """The lines of a script by section, without indentation and blank lines."""
    result, name = {"": []}, ""
    for line in text.splitlines():
        for mark, title in MARKS.items():
            if found := re.match(mark, line):
                name = title + "".join(found.groups())
                assert name not in result, f"two sections are called {name!r}"
                result[name] = []
        if line.strip():
            result[name].append(line.strip())
    return result


def own_lines(left: list[str], right: list[str]) -> tuple[int, int]:
    """How many lines only the left side has, and how many only the right one; two of a kind are two."""
    return (Counter(left) - Counter(right)).total(), (Counter(right) - Counter(left)).total()


def same_order(left: list[str], right: list[str]) -> bool:
    """Whether the lines that each side has once stand in the same order."""
    once = {line for line in left if left.count(line) == right.count(line) == 1}
    return [line for line in left if line in once] == [line for line in right if line in once]


@pytest.fixture(scope="module")
def scripts():
    return {name: sections((ROOT / f"{name}.py").read_text()) for name in ("train_grpo", *LINES)}


SHARED = [(script, section) for script, counts in LINES.items() for section in counts]


def test_the_sections_hold_every_line(scripts):
    for name, parts in scripts.items():
        lines = [line.strip() for line in (ROOT / f"{name}.py").read_text().splitlines() if line.strip()]
        assert [line for part in parts.values() for line in part] == lines and all(parts.values())
        assert parts.keys() - OWN == LINES[name if name in LINES else "train_ppo"].keys()


@pytest.mark.parametrize(("script", "section"), SHARED)
def test_scripts_differ_where_they_should_and_nowhere_else(scripts, script, section):
    left, right = scripts["train_grpo"][section], scripts[script][section]
    found, written = own_lines(left, right), LINES[script][section]
    ordered = same_order(left, right) or (script, section) in REARRANGED
    assert found == written and ordered, (
        f"train_grpo.py (-) and {script}.py (+) have drifted apart in {section!r}: {found}, not {written} lines of "
        f"their own, {'in the same' if ordered else 'the others in another'} order. Mended something? Mend it in all "
        "scripts. If they are meant to differ, write that down here.\n"
        + "\n".join(difflib.unified_diff(left, right, n=0, lineterm=""))
    )


@pytest.mark.parametrize(("script", "section"), SHARED)
def test_what_is_mended_in_one_script_only_is_noticed(scripts, script, section):
    """Each line that both have is changed, removed or added to: in either script, and then in both."""
    left, right, written = scripts["train_grpo"][section], scripts[script][section], LINES[script][section]
    for line in set(left) & set(right):
        i, j = left.index(line), right.index(line)
        for mended in ([], [line + "  # mended"], [line, "mended()"]):
            one, other = [*left[:i], *mended, *left[i + 1 :]], [*right[:j], *mended, *right[j + 1 :]]
            assert own_lines(one, other) == written
            if left.count(line) <= right.count(line):  # else one of them is this script's own
                assert own_lines(one, right) != written, line
            if right.count(line) <= left.count(line):
                assert own_lines(left, other) != written, line


def test_another_order_in_one_script_only_is_noticed(scripts):
    for script, section in set(SHARED) - REARRANGED:
        left, right = scripts["train_grpo"][section], scripts[script][section]
        once = [i for i, line in enumerate(left) if left.count(line) == right.count(line) == 1]
        assert len(once) > 1
        for i, j in zip(once, once[1:], strict=False):
            swapped = [left[{i: j, j: i}.get(k, k)] for k in range(len(left))]
            assert not same_order(swapped, right) and not same_order(right, swapped)
