"""Which test files to run after a change.

    python tests/affected.py rl/data/rows.py docs/metrics.md            # prints them, one on a line
    pytest $(python tests/affected.py $(git diff --name-only main))     # those that a branch may have broken

A test file needs the files that it imports, at its top or inside functions, those that it names, those that the
fixtures of its conftest.py use, and everything that these files need in turn. A file is named by its path
(`ROOT / "docs" / "metrics.md"`), by the name of a script ("train_ppo"), by the name of a program beside the test, or by
that of a module in a text ("rl.scoring.worker.main"). A test also needs the files that its patterns lead to, such as
`(ROOT / "rl").rglob("*.py")`, but nothing that these need.

An extra is different, since nobody needs more of it than its door without using it, which test_deletion.py checks. So a
test needs the room behind a door only if it imports a file of that extra or names one of its flags. It also needs the
room if it starts a script, other than train_grpo.py, that imports the door. What helpers_scripts.py imports is not
such a use.
"""

import ast
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
SHARED_BY_ALL = {TESTS / name for name in ("conftest.py", "helpers_scripts.py", "launch.py")}  # they name much
MODULE = re.compile(r"\b(?:rl|extras|rewards|environments|data|benchmarks|tools)(?:\.\w+)+")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Everything in a Python file, except for docstrings, which name much that is not used."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
    return list(ast.walk(tree))


@functools.cache
def module_files(name: str, beside: Path) -> frozenset[Path]:
    """The files that importing a module executes, if it is one of the repository: its packages' and its own."""
    parts = name.split(".")
    for root in (ROOT, TESTS, TESTS / "model", beside):
        if (root / parts[0]).is_dir() or (root / f"{parts[0]}.py").is_file():
            places = [root.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
            candidates = [x for place in places for x in (place.with_suffix(".py"), place / "__init__.py")]
            if files := frozenset(x for x in candidates if x.is_file()):
                return files
    return frozenset()


@functools.cache
def imports(path: Path) -> list[tuple[str, str]]:
    """(name in this file, dotted name) of all that a file imports."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.asname or alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@functools.cache
def constants(path: Path) -> dict[str, ast.expr]:
    """The values of a file's constants, such as `PAGES = ROOT / "docs"`."""
    assigned = [node for node in nodes(path) if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    return {node.targets[0].id: node.value for node in assigned if node.targets[0].id.isupper()}


def as_path(node: ast.expr, path: Path) -> Path | None:
    """The path that an expression stands for: ROOT, TESTS, a constant for a path, or one of these / "name"."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        folder, name = as_path(node.left, path), node.right
        is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
        return folder / name.value if folder is not None and is_text else None
    name = ast.unparse(node).removeprefix("launch.")
    if name in ("ROOT", "TESTS"):
        return ROOT if name == "ROOT" else TESTS
    return as_path(constants(path)[name], path) if name in constants(path) else None


@functools.cache
def texts(path: Path) -> list[str]:
    return [node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@functools.cache
def needs(path: Path) -> frozenset[Path]:
    """The files that a file imports or names; none if it is not Python."""
    if path.suffix != ".py":
        return frozenset()
    files = {file for _, name in imports(path) for file in module_files(name, path.parent)}
    for text in texts(path):
        files |= {file for name in MODULE.findall(text) for file in module_files(name, path.parent)}
    if path.is_relative_to(TESTS) or path.is_relative_to(ROOT / "benchmarks"):
        if path not in SHARED_BY_ALL:
            files |= set().union(*(named_by(text, path) for text in texts(path) if len(text) < 200))
            places = [as_path(node, path) for node in nodes(path) if isinstance(node, ast.BinOp)]
            files |= {place for place in places if place is not None and place.is_file()}
            if any(ast.unparse(node) == "launch.SCRIPTS" for node in nodes(path) if isinstance(node, ast.Attribute)):
                files |= set(ROOT.glob("*.py"))
    return frozenset(files - {path})


def named_by(text: str, path: Path) -> set[Path]:
    """The files that a text of a test names: a script, a path, or a program beside the test."""
    script = ROOT / f"{text.removesuffix('.py')}.py"
    places = [script, ROOT / text, TESTS / text, path.parent / text] if re.fullmatch(r"[\w./-]+", text) else []
    return {place for place in places if place.is_file()}


@functools.cache
def read_by(path: Path) -> frozenset[Path]:
    """The files that the patterns in a Python file lead to, which it reads, and does not run."""
    files: set[Path] = set()
    for node in nodes(path) if path.suffix == ".py" else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("glob", "rglob"):
            folder = as_path(node.func.value, path)
            if folder is not None and isinstance(node.args[0], ast.Constant):
                files |= set(getattr(folder, node.func.attr)(node.args[0].value))
    return frozenset(files)


# ---------------------------------------------------------------------------------------------------------------------
# Fixtures and extras


@functools.cache
def fixtures(path: Path) -> dict[str, tuple[frozenset[Path], frozenset[str]]]:
    """{fixture: (files that it uses, names in it, which may be other fixtures)} of a conftest.py or of a helper."""
    files: dict[str, frozenset[Path]] = {}
    for alias, name in imports(path):
        files[alias] = files.get(alias, frozenset()) | module_files(name, path.parent)
    defined = {}
    for node in nodes(path):
        if isinstance(node, FUNCTIONS) and any("fixture" in ast.unparse(x) for x in node.decorator_list):
            words = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
            words |= {x.arg for x in ast.walk(node) if isinstance(x, ast.arg)}
            words |= {x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
            defined[node.name] = frozenset().union(*(files.get(x, ()) for x in words)), frozenset(words)
    return defined


def needs_by_fixtures(test: Path) -> set[Path]:
    """The files that the fixtures which a test takes use."""
    known = dict(fixtures(TESTS / "conftest.py"))
    if (beside := test.parent / "conftest.py").is_file():
        for path in (beside, *needs(beside)):  # it may import some from a helper
            known |= fixtures(path)
    rest = [*texts(test), *(node.arg for node in nodes(test) if isinstance(node, ast.arg))]
    files, seen = set(), set()
    while rest:
        if (name := rest.pop()) in known and name not in seen:
            seen.add(name)
            files |= known[name][0]
            rest += known[name][1]
    return files


@functools.cache
def flags_of(extra: str) -> frozenset[str]:
    """The flags that the door of an extra declares."""
    classes = [node for node in nodes(ROOT / "extras" / extra / "__init__.py") if isinstance(node, ast.ClassDef)]
    groups = [node for node in classes if any("dataclass" in ast.unparse(x) for x in node.decorator_list)]
    return frozenset(x.target.id for node in groups for x in node.body if isinstance(x, ast.AnnAssign))


EXTRAS = sorted(path.parent.name for path in ROOT.glob("extras/*/__init__.py"))


def extra_of(path: Path) -> str | None:
    """The extra whose room a file belongs to; None also for doors."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "extras" and len(parts) > 2 and path.name != "__init__.py" else None


@functools.cache
def extras_used_by(path: Path) -> set[str]:
    """The extras that a file of tests/ imports or whose flags it names, and those that the scripts it names import."""
    files = set(needs(path))
    scripts = {x for x in files if x.parent == ROOT and x.suffix == ".py" and x.name != "train_grpo.py"}
    for script in scripts if len(scripts) < 4 else ():  # a test of all scripts looks at what they have in common
        files |= needs(script)
    words = {node.arg for node in nodes(path) if isinstance(node, ast.keyword)}
    words |= {x.removeprefix("--").replace("-", "_") for text in texts(path) for x in text.split() if len(text) < 500}
    named = {extra for extra in EXTRAS if words & flags_of(extra)}
    return named | {x.relative_to(ROOT).parts[1] for x in files if x.is_relative_to(ROOT / "extras")} & set(EXTRAS)


@functools.cache
def needed_by(test: Path) -> frozenset[Path]:
    """All files that a test file needs."""
    used: set[str] = set()  # extras
    rooms: set[Path] = set()  # files behind the doors that were met
    needed: set[Path] = set()
    rest = {test, *needs_by_fixtures(test)}
    while rest:
        needed |= rest
        for path in rest:
            if path.name == "__init__.py" and path.parent.parent == ROOT / "extras":
                rooms |= set(path.parent.glob("*.py"))
            if path.is_relative_to(TESTS) and path.suffix == ".py" and path not in SHARED_BY_ALL:
                used |= extras_used_by(path)
        followed = {x for path in rest for x in needs(path) if not (path.name == "__init__.py" and extra_of(x))}
        rest = (followed | {x for x in rooms if extra_of(x) in used}) - needed
    return frozenset(needed.union(*(read_by(path) for path in needed if path.is_relative_to(TESTS))))


def affected(changed: list[Path]) -> list[Path]:
    """The test files, in order, that need one of the changed files, which may exist no more."""
    shared = [path.parent for path in changed if path.name == "conftest.py"]
    tests = sorted(TESTS.glob("*/test_*.py"))
    return [x for x in tests if needed_by(x) & set(changed) or any(x.is_relative_to(folder) for folder in shared)]


def main(names: list[str]) -> None:
    changed = [file for name in names for file in ([*Path(name).rglob("*")] if Path(name).is_dir() else [Path(name)])]
    for test in affected([file.resolve() for file in changed]):
        print(test.relative_to(ROOT))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
