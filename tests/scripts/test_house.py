"""How much code a reader has to face: the lines of the core, the wall and each script, and what a script loads.

An extra is a folder in extras/, which the others know only by its door, the folder's __init__.py. That a default run
needs no more of it is tested by test_deletion.py.

A code line is a line that is not blank, not a comment and not part of a docstring. The core is rl/ without rl/run/, and
the wall is rl/run/. "import sft" counts the code lines of every file of rl/ that importing sft.py executes: imports at
the top of a module count, also inside `if` and `try`, and imports inside functions do not. A door is not part of that:
it has a limit of its own.

`PYTHONPATH=.:tests python tests/scripts/test_house.py` prints the figures beside their limits. With `--shape` it also
prints what has no limit: imports of extras, functions with many parameters, containers, and mentions of `Any`.
"""

import ast
import functools
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import launch
import pytest
from launch import ROOT

# Limits may only fall. Whoever makes a figure smaller lowers its limit here.
LIMITS = {
    "core": 2991,
    "wall": 1609,
    "import train_grpo": 3942,
    "import sft": 2417,
    "import eval": 1290,
    "eval.py": 107,
    "sft.py": 93,
    "train_async.py": 152,
    "train_dapo.py": 195,
    "train_distill.py": 167,
    "train_dpo.py": 173,
    "train_grpo.py": 127,
    "train_grpo_variants.py": 214,
    "train_ppo.py": 194,
    "train_prime.py": 195,
    "train_reinforce.py": 186,
    "train_reward.py": 99,
    "train_self_distill.py": 131,
    "train_self_distill_variants.py": 179,
}

# Only the lines of a new check may raise a limit: a line (figure, code lines, the check in a sentence) under its
# heading. What is allowed to the core or to the wall is allowed to every import too.
ALLOWANCES: list[tuple[str, int, str]] = [
    # Texts that become tokens: prompts, demonstrations, templates.
    ("core", 160, "A text of a row that is not among its tokens is an error which names the row and the field."),
    ("core", 24, "Columns that could change a prompt are refused by name."),
    ("core", 36, "Arguments for the chat template are refused if they are wrong or if it does not read them."),
    ("core", 28, "A text gets one BOS and no EOS, and a partial answer is continued, or refused by name."),
    ("wall", 16, "A run that is resumed on another day renders its prompts with the date of its first day."),
    ("eval.py", 2, "eval.py has the flags that decide how rows become tokens."),
    # Data files and their size.
    ("core", 20, "A text far over a limit of tokens is refused or dropped before all of it is tokenized."),
    ("core", 100, "Rows are read, kept and tokenized in chunks, so that a million of them take at most 2 GiB."),
    # Models and their folders.
    ("core", 108, "A folder that is not a whole model is refused before loading, with flag, path and reason."),
    ("core", 16, "The check of the engine has no pass of more tokens than a micro-batch."),
    ("core", 11, "Ranks whose machines have other files of a model under its path are refused."),
    # Engines and pushes of weights.
    # Rewards and judges.
    # Flags.
    ("core", 30, "Texts and what takes memory have limits, and a flag whose capability is off is refused."),
    # Checkpoints, resuming and trackers.
    ("wall", 57, "Every field that is read of a checkpoint is checked, and named if it is not as saved."),
    # Ranks, stops and processes.
    ("wall", 2, "Ranks and models that --sequence-parallel-size cannot divide are refused before a model is loaded."),
    # What extras/sequence_parallel needs of the core. The issue that asked for it granted 150 lines.
    ("core", 18, "Ranks that train on the same rows are told from those that sample, and a row from its slices."),
    # Losses that were asked for, on the shelf of formulas. That issue granted 60 lines, with --dtype float16.
    ("core", 14, "The losses vespo and dro."),
    # What --dtype float16 needs of the core. The issue that asked for it granted 60 lines.
    ("core", 22, "A loss has a scale in float16, and a GPU without bfloat16 computes in float16 or is refused."),
    # What an agent's several conversations need of the core. The issue that asked for it granted 80 lines.
    ("core", 66, "A response may have several rows, which share its advantage and its update, and count as one."),
    ("train_dpo.py", 2, "DPO refuses --agent by name, since its pairs compare two rows."),
    ("train_ppo.py", 2, "PPO refuses --agent by name, until values over several rows are defined."),
    ("train_prime.py", 2, "PRIME refuses --agent by name, until returns over several rows are defined."),
    ("train_reinforce.py", 2, "REINFORCE++ and ReMax refuse --agent by name, until returns over rows are defined."),
    ("train_self_distill.py", 2, "Self-distillation refuses --agent by name, since agents have no place for a hint."),
    ("train_self_distill_variants.py", 2, "Its variants refuse --agent by name, for the same reason."),
]

DOOR = 60  # code lines that the door of an extra may have

RULE = (
    "Limits may only fall. A figure that has grown is paid for by simplifying something else. Only the lines of a "
    "new check may raise a limit: add (figure, lines, the check in a sentence) to ALLOWANCES in this test's file."
)

DOORS = sorted(ROOT.glob("extras/*/__init__.py"))
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  # of docstrings


def lines_of(node: ast.stmt | tokenize.TokenInfo) -> range:
    if isinstance(node, tokenize.TokenInfo):
        return range(node.start[0], node.end[0] + 1)
    return range(node.lineno, node.end_lineno + 1)


def docstring_lines(source: str) -> set[int]:
    owners = [node for node in ast.walk(ast.parse(source)) if isinstance(node, OWNERS)]
    return set().union(*(lines_of(x.body[0]) for x in owners if ast.get_docstring(x, clean=False) is not None))


def code_lines(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = set().union(*(lines_of(token) for token in tokens if token.type not in NO_CODE))
    return len(code - docstring_lines(source))


@functools.cache
def size(path: Path) -> int:
    return code_lines(path.read_text())


def at_the_top(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that importing a module executes."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_the_top(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for name in ("body", "orelse", "finalbody", "handlers"):
                yield from at_the_top(getattr(node, name, []))


def files_of(module: str) -> set[Path]:
    """The files that importing a module of the repository executes first: those of its packages, and its own."""
    parts = module.split(".")
    folders = [ROOT.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
    return {x for folder in folders for x in (folder.with_suffix(".py"), folder / "__init__.py") if x.is_file()}


@functools.cache
def imported_by(path: Path) -> frozenset[Path]:
    names = set()
    for node in at_the_top(ast.parse(path.read_text()).body):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        names |= {module + alias.name for alias in node.names}
    return frozenset().union(*map(files_of, names))


def loaded_by(script: str) -> set[Path]:
    """Every file of the repository that importing a script executes, except the script itself."""
    seen, rest = set(), [ROOT / f"{script}.py"]
    while rest:
        if (path := rest.pop()) not in seen:
            seen.add(path)
            rest += imported_by(path)
    return seen - {ROOT / f"{script}.py"}


def figures() -> dict[str, int]:
    wall = set((ROOT / "rl" / "run").rglob("*.py"))
    core = set((ROOT / "rl").rglob("*.py")) - wall
    files = {"core": core, "wall": wall}
    files |= {name: {ROOT / name} for name in LIMITS if name.endswith(".py")}
    files |= {name: loaded_by(name.split()[1]) & (core | wall) for name in LIMITS if name.startswith("import ")}
    return {name: sum(map(size, paths)) for name, paths in files.items()}


def limit(figure: str) -> int:
    owners = {figure, "core", "wall"} if figure.startswith("import ") else {figure}
    return LIMITS[figure] + sum(lines for name, lines, _ in ALLOWANCES if name in owners)


@pytest.mark.parametrize("figure", LIMITS)
def test_the_house_does_not_grow(figure):
    now, most = figures()[figure], limit(figure)
    assert now <= most, f"{figure} has {now:,} code lines, and its limit is {most:,}. {RULE}"


def test_every_allowance_names_a_figure_and_a_check():
    for figure, lines, reason in ALLOWANCES:
        assert figure in LIMITS and not figure.startswith("import "), f"{figure!r}: name core, wall or a script"
        assert lines > 0 and len(reason.split()) > 4, (figure, lines, reason)


def test_every_script_has_a_limit():
    assert {name for name in LIMITS if name.endswith(".py")} == {f"{name}.py" for name in (*launch.SCRIPTS, "eval")}


@pytest.mark.parametrize("script", [name.removesuffix(".py") for name in LIMITS if name.endswith(".py")])
def test_a_script_loads_nothing_of_the_repository_but_the_library(script):
    """Rewards, environments and data sets are named by flags and are loaded by the processes that run them. Of an extra
    only the door is loaded.
    """
    loaded = {path.relative_to(ROOT).as_posix() for path in loaded_by(script)}
    assert len(loaded) > 20
    doors = {path.relative_to(ROOT).as_posix() for path in DOORS}
    assert {name for name in loaded if not name.startswith("rl/")} <= doors | {"extras/__init__.py"}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.parent.name)
def test_a_door_is_small_and_imports_no_machine(door):
    assert size(door) <= DOOR, f"{door} has {size(door)} code lines, and a door has at most {DOOR}"
    for node in at_the_top(ast.parse(door.read_text()).body):
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} - {"rl.flags"}
        assert not others, f"{door} imports {others} at the top; import it inside the function that needs it"


@pytest.mark.parametrize("part", ["core", "wall"])
def test_core_and_wall_know_an_extra_only_by_its_door(part):
    wall = set((ROOT / "rl" / "run").rglob("*.py"))
    for path in wall if part == "wall" else set((ROOT / "rl").rglob("*.py")) - wall:
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [module]
            rooms = [name for name in names if name.startswith("extras.") and name.count(".") > 1]
            assert not rooms, f"{path} imports {rooms}; only the door of an extra may be imported"


@pytest.mark.parametrize("extra", DOORS, ids=lambda door: door.parent.name)
def test_an_extra_knows_the_core_its_own_room_and_doors(extra):
    for path in sorted(extra.parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            files = {file for name in names for file in files_of(name)}
            wall = {file for file in files if file.is_relative_to(ROOT / "rl" / "run")}
            assert not wall, f"{path} imports {names} of the wall; the caller can hand in what is needed"
            rooms = {file for file in files if file.is_relative_to(ROOT / "extras") and file.name != "__init__.py"}
            others = {file for file in rooms if not file.is_relative_to(extra.parent)}
            assert not others, f"{path} imports {names} of another extra; only its door may be imported"


def shape(files: set[Path]) -> dict[str, int]:
    """What makes code hard to follow, beside its length, in some files."""
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    of_extras = [
        {file for alias in node.names for file in files_of(prefix + alias.name) if file.parent.parent.name == "extras"}
        for node in imports
        for prefix in [f"{node.module}." if isinstance(node, ast.ImportFrom) else ""]
    ]
    functions = [node.args for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    counts = [len([*x.posonlyargs, *x.args, *x.kwonlyargs]) for x in functions]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    bases = [" ".join(map(ast.unparse, [*node.bases, *node.decorator_list])) for node in classes]
    return {
        "imports of doors": sum(bool(x) and {file.name for file in x} == {"__init__.py"} for x in of_extras),
        "imports of rooms of extras": sum({file.name for file in x} > {"__init__.py"} for x in of_extras),
        "functions with more than six parameters": sum(count > 6 for count in counts),
        "dataclasses and named tuples": sum("dataclass" in x or "NamedTuple" in x for x in bases),
        "mentions of Any": sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
    }


def test_the_front_page_says_how_long_the_code_is():
    page, now = " ".join((ROOT / "README.md").read_text().split()), figures()
    lines = (ROOT / "train_grpo.py").read_text().splitlines()
    assert f"`train_grpo.py` is GRPO in {now['train_grpo.py']} lines of code, {len(lines)} with comments" in page
    assert "has fewer than 4,000 lines of code for its core and about 1,700 for what keeps a run alive" in page
    assert now["core"] < 4000 and 1650 <= now["wall"] < 1750
    assert "is in `extras/`, about 9,200 lines" in page
    assert 8950 <= sum(map(size, (ROOT / "extras").rglob("*.py"))) < 9450


def test_what_counts_as_a_code_line():
    source = '"""A module.\n\nTwo."""\n\nimport os  # one\n# none\n\n\n'
    source += 'def f(x):  # two\n    """None."""\n    return """\n\n"""\n'
    assert code_lines(source) == 5  # import, def, and three lines of a text that is not a docstring
    assert code_lines("") == code_lines("# nothing\n") == 0
    assert code_lines("x = [\n    1,\n\n    # no\n    2,\n]\n") == 4


def test_what_counts_as_an_import():
    source = "import a\nif x:\n    import b\nelse:\n    import c\ntry:\n    import d\n"
    source += "except E:\n    import e\nfinally:\n"
    source += "    import f\nwith x:\n    import g\nclass X:\n    from h import i\n"
    source += "def y():\n    import no\nif TYPE_CHECKING:\n    import no\n"
    assert {node.names[0].name for node in at_the_top(ast.parse(source).body)} == set("abcdefgi")
    assert files_of("rl.run.task") == {ROOT / "rl/__init__.py", ROOT / "rl/run/__init__.py", ROOT / "rl/run/task.py"}
    assert files_of("torch.distributed") == set()


if __name__ == "__main__":
    for figure, now in figures().items():
        print(f"{figure}: {now:,} code lines, at most {limit(figure):,}")
    print(f"extras: {sum(map(size, (ROOT / 'extras').rglob('*.py'))):,} code lines")
    if "--shape" in sys.argv:
        wall = set((ROOT / "rl" / "run").rglob("*.py"))
        for part, files in {"core": set((ROOT / "rl").rglob("*.py")) - wall, "wall": wall}.items():
            print(part, *(f"{count} {name}" for name, count in shape(files).items()), sep="; ")
