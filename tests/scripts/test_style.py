"""The rules that keep the code readable: who may import whom, what a script may do, what must be documented."""

import ast
from pathlib import Path

import pytest
from launch import ROOT
from torch.distributed.run import get_args_parser

SCRIPTS = [ROOT / f"{name}.py" for name in ("eval", "sft", "train_dapo", "train_grpo", "train_ppo", "train_reward")]
LIBRARY = sorted((ROOT / "rl").rglob("*.py"))
FORMULAS = [ROOT / "rl" / f"{name}.py" for name in ("advantages", "losses", "schedule")]
SCRIPT_NAMES = {path.stem for path in SCRIPTS}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> set[str]:
    """Dotted names of all modules a file imports, wherever in it, with `from a import b` as a and a.b."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_lists_above_are_not_empty():
    assert {"train_grpo", "train_ppo", "train_dapo", "sft", "eval"} <= SCRIPT_NAMES
    assert len(LIBRARY) > 10 and set(FORMULAS) < set(LIBRARY)


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_scripts_never_import_each_other(path):
    assert not top(imported(path)) & SCRIPT_NAMES
    assert "rl" in top(imported(path))


@pytest.mark.parametrize("path", LIBRARY, ids=label)
def test_the_library_imports_neither_scripts_nor_rewards_nor_data_sets(path):
    assert not top(imported(path)) & (SCRIPT_NAMES | {"rewards", "data", "benchmarks", "tests"})


@pytest.mark.parametrize("path", FORMULAS, ids=label)
def test_formulas_know_tensors_and_nothing_else(path):
    assert top(imported(path)) <= {"math", "torch"}
    assert not {name for name in imported(path) if name.startswith(("torch.distributed", "torch.cuda"))}


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_importing_a_script_runs_nothing(path):
    for node in tree(path).body:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'", f"{path}:{node.lineno}"
            continue
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), f"{path}:{node.lineno}: a statement at import"
            continue
        assert isinstance(
            node, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)
        ), f"{path}:{node.lineno}: {type(node).__name__} at import"
        if isinstance(node, (ast.Assign, ast.AnnAssign)):  # a table of functions, not a call
            deferred = {id(x) for f in ast.walk(node) if isinstance(f, ast.Lambda) for x in ast.walk(f)}
            calls = [x for x in ast.walk(node) if isinstance(x, ast.Call) and id(x) not in deferred]
            assert not calls, f"{path}:{node.lineno}: {ast.unparse(calls[0])} at import"


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_a_script_is_args_and_main(path):
    names = {node.name: node for node in tree(path).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert [a.arg for a in names["main"].args.args] == ["args"]
    assert ast.unparse(names["main"].returns) == "dict[str, float]"
    assert ast.unparse(names["Args"].decorator_list[0]) == "dataclass(frozen=True)"


@pytest.mark.parametrize(("script", "lines"), [("train_grpo", 530), ("train_ppo", 590), ("train_dapo", 550)])
def test_a_script_fits_in_one_reading(script, lines):
    assert len((ROOT / f"{script}.py").read_text().splitlines()) <= lines


@pytest.mark.parametrize("path", [*SCRIPTS, *FORMULAS], ids=label)
def test_no_guessing_at_attributes_and_no_swallowed_errors(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("getattr", "hasattr", "setattr"), f"{path}:{node.lineno}: {node.func.id}"
        if isinstance(node, ast.ExceptHandler):
            caught = "everything" if node.type is None else ast.unparse(node.type)
            assert caught not in ("everything", "Exception", "BaseException"), f"{path}:{node.lineno}: {caught}"


@pytest.mark.parametrize("path", [p for p in LIBRARY if p.stem != "scoring_worker"], ids=label)  # users' SystemExit
def test_no_bare_except_in_the_library(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None and ast.unparse(node.type) != "BaseException", f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", [p for p in LIBRARY if p.read_text().strip()], ids=label)
def test_every_public_function_and_module_is_documented(path):
    module = tree(path)
    assert ast.get_docstring(module), f"{path} has no docstring"
    bodies = [module.body, *(node.body for node in module.body if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body if isinstance(node, ast.FunctionDef)):
        if not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_every_function_of_a_script_is_documented(path):
    assert ast.get_docstring(tree(path))
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_no_flag_is_an_abbreviation_of_a_torchrun_option(path):
    """`torchrun script.py --n 4` fails: torchrun reads --n as short for --nnodes and others, wherever it stands."""
    options = [option for action in get_args_parser()._actions for option in action.option_strings]
    (args,) = (node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == "Args")
    flags = ["--" + node.target.id.replace("_", "-") for node in args.body if isinstance(node, ast.AnnAssign)]
    assert len(flags) > 10
    assert [flag for flag in flags if any(option.startswith(flag) for option in options)] == []
