"""The scripts repeat each other on purpose, so that a diff of two of them shows the algorithm; nothing else may differ.

The rule: in every section, a script differs from train_grpo.py by exactly the number of lines written down here. Who
mends a line that two scripts share, in one of them only, makes it one more.
"""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
        "validate": (3, 11),
        "evaluate": (0, 0),
        "main": (5, 21),
        "rollouts": (4, 11),
        "phase 4": (1, 1),
        "phase 5": (1, 5),
        "phase 7": (16, 34),
        "phase 8": (11, 15),
        "phase 9": (1, 1),
        "closing": (0, 0),
    },
    "train_dapo": {
        "imports": (0, 0),
        "Args": (21, 17),
        "validate": (6, 11),
        "evaluate": (0, 0),
        "main": (9, 14),
        "rollouts": (12, 32),
        "phase 4": (0, 2),
        "phase 5": (6, 2),
        "phase 7": (6, 2),
        "phase 8": (4, 8),
        "phase 9": (2, 2),
        "closing": (0, 0),
    },
}


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


def difference(left: list[str], right: list[str]) -> list[str]:
    """Lines of only one side, with "- " or "+ " before them."""
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    changes = [x for x in matcher.get_opcodes() if x[0] != "equal"]
    return [s for _, i, j, k, m in changes for s in (*(f"- {x}" for x in left[i:j]), *(f"+ {x}" for x in right[k:m]))]


def count(lines: list[str]) -> tuple[int, int]:
    """How many of `difference` are on the left, and how many on the right."""
    return sum(x[0] == "-" for x in lines), sum(x[0] == "+" for x in lines)


@pytest.fixture(scope="module")
def scripts():
    return {name: sections((ROOT / f"{name}.py").read_text()) for name in ("train_grpo", *LINES)}


SHARED = [(script, section) for script, counts in LINES.items() for section in counts]


def test_the_sections_hold_every_line(scripts):
    for name, parts in scripts.items():
        lines = [line.strip() for line in (ROOT / f"{name}.py").read_text().splitlines() if line.strip()]
        assert [line for part in parts.values() for line in part] == lines
        assert all(part for part in parts.values())
        assert (
            parts.keys() - OWN
            == scripts["train_grpo"].keys() - OWN
            == LINES[name if name in LINES else "train_ppo"].keys()
        )


@pytest.mark.parametrize(("script", "section"), SHARED)
def test_scripts_differ_where_they_should_and_nowhere_else(scripts, script, section):
    lines = difference(scripts["train_grpo"][section], scripts[script][section])
    assert count(lines) == LINES[script][section], (
        f"train_grpo.py (-) and {script}.py (+) have drifted apart in {section!r}. Mended something? Mend it in all "
        "scripts. If they are meant to differ, write the new numbers down in LINES:\n" + "\n".join(lines)
    )


@pytest.mark.parametrize(("script", "section"), SHARED)
def test_a_line_that_is_mended_in_one_script_only_is_noticed(scripts, script, section):
    """Every line that two scripts share: changed, removed or added to, in either of them, and in both."""
    left, right = scripts["train_grpo"][section], scripts[script][section]
    matcher, tried = difflib.SequenceMatcher(None, left, right, autojunk=False), 0
    for i, j, size in matcher.get_matching_blocks():
        for k in range(size):
            for mended in ([], [left[i + k] + "  # mended"], [left[i + k], "mended()"]):
                one, other = ([*x[:n], *mended, *x[n + 1 :]] for x, n in ((left, i + k), (right, j + k)))
                assert count(difference(one, right)) != LINES[script][section]
                assert count(difference(left, other)) != LINES[script][section]
                assert count(difference(one, other)) == LINES[script][section]
                tried += 1
    assert tried >= 3 and tried == 3 * (len(left) - LINES[script][section][0])
