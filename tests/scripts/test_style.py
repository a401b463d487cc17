"""The rules that keep the code readable: who may import whom, what a script may do, what must be documented."""

import ast
import importlib
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import launch
import pytest
import torch.distributed as dist
from launch import ROOT
from torch.distributed.run import get_args_parser

from rl import flags
from rl.data import token_selection
from rl.formulas import correction
from rl.model.lora import LoRA

SCRIPTS = sorted(ROOT.glob("*.py"))
LIBRARY = sorted((ROOT / "rl").rglob("*.py"))
FORMULAS = "advantages correction distillation implicit_reward losses preference schedule".split()
FORMULAS = [ROOT / "rl" / f"{name}.py" for name in FORMULAS]
FORMULA_NAMES = {*(path.stem for path in FORMULAS), "ADVANTAGES", "DISTANCES", "LOSSES", "PAIRS"}
SCRIPT_NAMES = {path.stem for path in SCRIPTS}
LINES = {"sft": 200, "train_reward": 200, "eval": 200}  # else 330
BEFORE_THE_LOOP = 40  # lines of main, at most
NESTING = {"train_ppo": 5}  # else 4 blocks within each other in main, at most


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


def args_of(path: Path) -> type:
    """The class Args of a script."""
    return importlib.import_module(path.stem).Args


def main_of(path: Path) -> ast.FunctionDef:
    return next(node for node in tree(path).body if isinstance(node, ast.FunctionDef) and node.name == "main")


def test_the_lists_above_are_not_empty():
    assert {"train_grpo", "train_ppo", "train_dapo", "train_reinforce", "sft", "eval"} <= SCRIPT_NAMES
    assert len(LIBRARY) > 10 and set(FORMULAS) < set(LIBRARY)


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_scripts_never_import_each_other(path):
    assert not top(imported(path)) & SCRIPT_NAMES
    assert "rl" in top(imported(path))


@pytest.mark.parametrize("path", LIBRARY, ids=label)
def test_the_library_imports_neither_scripts_nor_rewards_nor_data_sets(path):
    assert not top(imported(path)) & (SCRIPT_NAMES | {"rewards", "data", "benchmarks", "tests"})


def test_what_keeps_a_run_alive_stands_behind_a_wall():
    """rl/run knows no formula. The rest of rl only asks it whether to stop, where it may take long; scripts hold it."""
    wall = [path for path in LIBRARY if path.parent.name == "run"]
    formulas = {f"rl.{path.stem}" for path in FORMULAS}
    behind = {f"rl.run.{path.stem}" for path in wall} | {"rl.run"}
    assert len(wall) > 8
    for path in wall:
        assert not imported(path) & formulas, path
    for path in set(LIBRARY) - set(wall):
        asks = path.stem in ("rollout", "evaluation", "pool")
        assert imported(path) & behind <= ({"rl.run", "rl.stop"} if asks else set()), path
    for path in SCRIPTS:
        assert imported(path) & behind <= {"rl.run.run"}, path


def test_vllm_is_imported_by_its_own_files_only():
    users = {path.stem for path in LIBRARY if "vllm" in top(imported(path))}
    assert users == {"vllm", "vllm_scheduler", "vllm_worker"}
    assert not any("vllm" in top(imported(path)) for path in SCRIPTS)


@pytest.mark.parametrize("path", FORMULAS, ids=label)
def test_formulas_know_tensors_and_nothing_else(path):
    """But for the limits of the flags that rl/formulas/correction.py has, with the formulas that read them."""
    own = {"dataclasses", "typing", "rl"} if path.stem == "correction" else set()
    assert top(imported(path)) <= {"math", "torch"} | own
    assert not {name for name in imported(path) if name.startswith("rl.") and not name.startswith("rl.flags")}
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


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_a_script_fits_in_one_reading(path):
    assert len(path.read_text().splitlines()) <= LINES.get(path.stem, 330)
    main = main_of(path)
    if loops := [node.lineno for node in main.body if isinstance(node, ast.For)]:
        assert loops[0] - main.lineno <= BEFORE_THE_LOOP
    else:
        assert path.stem == "eval"

    def depth(body: list[ast.stmt]) -> int:
        return max((depth_of(node) for node in body), default=0)

    def depth_of(node: ast.stmt) -> int:
        chained = isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)  # elif
        inner = 1 + max(
            depth(getattr(node, name, [])) for name in ("body", "finalbody", "orelse")[: 2 if chained else 3]
        )
        return max(inner, depth_of(node.orelse[0])) if chained else inner

    assert depth(main.body) - 1 <= NESTING.get(path.stem, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Flags: what is learned stands in the scripts, or in rl/model/lora.py if all have it; the rest in rl/flags.py


FLAGS = (ROOT / "rl" / "flags.py").read_text().splitlines()
SHARED = {field.name for field in fields(flags.RL)} | {field.name for field in fields(flags.Supervised)}


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_a_flag_stands_once(path):
    """In the script or in rl/flags.py; in both only if the script gives it another default or other words."""
    args = args_of(path)
    inherited = {field.name: field for base in args.__bases__ for field in fields(base)}
    shared = (flags.Scoring, correction.Correction, token_selection.Choice, LoRA)
    assert set(inherited) <= SHARED | {field.name for kind in shared for field in fields(kind)}
    for name in args.__annotations__.keys() & inherited.keys():
        [line] = re.findall(rf"^    {name}: .*", path.read_text(), re.MULTILINE)
        assert vars(args)[name] != inherited[name].default or line not in FLAGS, f"{name} is as in rl/flags.py"
    for field in fields(args):
        assert field.default is not MISSING, f"{field.name} has no default"


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem != "eval"], ids=label)
def test_what_is_learned_is_decided_by_the_script_alone(path):
    """No line between the marks of the algorithm, and no formula wherever it is called, reads a flag of rl/flags.py."""
    source = path.read_text()
    if "=== algorithm ===" in source:
        algorithm = source[source.index("=== algorithm ===") : source.index("=== end ===")]
        used = set(re.findall(r"\bargs\.(\w+)", algorithm))
        assert len(used) > 5 and not used & SHARED
    else:
        assert path.stem in ("sft", "train_reward")
    for call in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).split(".")[0] in FORMULA_NAMES:
            assert not set(re.findall(r"\bargs\.(\w+)", ast.unparse(call))) & SHARED, ast.unparse(call)


def test_a_flag_that_picks_from_a_table_has_its_choices_from_there():
    """So a row that a copy of a script adds is a choice at once."""
    picked = [(path, *found) for path in SCRIPTS for found in re.findall(r"([A-Z]+)\[args\.(\w+)\]", path.read_text())]
    assert len(picked) >= 6
    assert [x for x in picked if f"    {x[2]}: Literal[*{x[1]}] = " not in x[0].read_text()] == []


def test_every_flag_is_read():
    read = {path: set(re.findall(r"\b(?:args|config)\.(\w+)", path.read_text())) for path in [*SCRIPTS, *LIBRARY]}
    of_library = set().union(*(read[path] for path in LIBRARY)) | {"custom_reward_function"}
    for path in SCRIPTS:
        own = args_of(path).__annotations__.keys() - SHARED
        assert own - of_library <= read[path]
    assert SHARED - {"project_name", "experiment_name"} <= set().union(*read.values())  # these two name the folder


@pytest.mark.parametrize("path", [*SCRIPTS, *LIBRARY], ids=label)
def test_nobody_keeps_a_list_of_flags(path):
    """What a flag may be, and whether a resumed run may change it, follows from its type and where it stands."""
    names = {field.name for script in SCRIPTS for field in fields(args_of(script))}
    for node in ast.walk(tree(path)):
        literals = getattr(node, "elts", []) + getattr(node, "keys", []) if not isinstance(node, ast.Call) else []
        words = [x.value for x in literals if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(names & set(node.value.split())) > 2:
            listed = [word for word in node.value.split() if word in names]
            assert len(listed) < len(node.value.split()) / 2, f"{path}:{node.lineno}: {node.value}"
        assert len(names & set(words)) <= 2, f"{path}:{getattr(node, 'lineno', 0)}: {words}"


# ---------------------------------------------------------------------------------------------------------------------
# Processes: nothing happens at import, and every collective says who must enter it


def takes_a_group(name: str) -> bool:
    function = getattr(dist, name)
    if not inspect.isfunction(function) or name.startswith(("_", "get_", "is_", "destroy", "init", "new")):
        return False
    return "group" in inspect.signature(function).parameters


COLLECTIVES = {
    name: list(inspect.signature(getattr(dist, name)).parameters) for name in dir(dist) if takes_a_group(name)
}


def unnamed_groups(source: str) -> list[str]:
    """Calls of collectives that leave the group to torch."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            assert not {alias.name for alias in node.names} & COLLECTIVES.keys(), "call it as dist.NAME"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTIVES:
            if ast.unparse(node.func.value) in ("dist", "torch.distributed"):
                place = COLLECTIVES[node.func.attr].index("group")
                if len(node.args) <= place and "group" not in [keyword.arg for keyword in node.keywords]:
                    found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", [*SCRIPTS, *LIBRARY], ids=label)
def test_every_collective_names_its_group(path):
    assert unnamed_groups(path.read_text()) == []


def test_a_collective_without_a_group_is_found():
    known = set("all_reduce all_gather all_gather_object all_to_all_single broadcast barrier send recv".split())
    assert known <= COLLECTIVES.keys()
    source = "dist.all_reduce(x, group=g)\ndist.all_gather(xs, x, g)\nranks.all_gather(x)\n"
    assert unnamed_groups(source) == []
    for call in ("dist.all_reduce(x)", "dist.all_gather(xs, x)", "torch.distributed.barrier()", "dist.send(x, 1)"):
        assert unnamed_groups(source + call) == [call]


IMPORTS = """
import atexit, ctypes, importlib, os, signal, sys, threading
import numpy, pyarrow.parquet, safetensors.torch, torch, torch.distributed.fsdp, torch.nn.attention.varlen, tyro
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

registered = []
os.register_at_fork = lambda **_: registered.append("at fork")
atexit.register = lambda *_, **__: registered.append("at exit")


def state():
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)  # PR_GET_PDEATHSIG
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    wakeup = signal.set_wakeup_fd(-1)
    return dict(
        environment=dict(os.environ), death=death.value, handlers=handlers, wakeup=wakeup, registered=list(registered),
        group=torch.distributed.is_initialized(), threads=threading.active_count(), random=torch.random.get_rng_state(),
        switches=sys.getswitchinterval(), folder=os.getcwd(), path=list(sys.path), num_threads=torch.get_num_threads(),
    )


before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
    after = state()
    changed = [key for key in before if str(before[key]) != str(after[key])]
    print(name, "changes", changed) if changed else None
    before = after
print("imported", len(sys.argv) - 1)
"""


CHANGES = """
import atexit, ctypes, os, signal, threading, torch.distributed

os.environ["CHANGED"] = "1"
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.signal(signal.SIGUSR1, lambda *_: None)
os.register_at_fork(after_in_child=print)
os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.distributed.init_process_group("gloo")
"""


def test_importing_a_module_changes_nothing_in_the_process(tmp_path):
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in [*LIBRARY, *SCRIPTS]]
    modules = [name.removesuffix(".__init__") for name in modules if not name.endswith("vllm_worker")]  # of vLLM
    (tmp_path / "changes.py").write_text(CHANGES)
    output = launch.run("-c", IMPORTS, *modules, "changes", PYTHONPATH=f"{ROOT}:{tmp_path}")
    changes, end = output.splitlines()
    assert changes.startswith("changes changes ['environment', 'death', 'handlers', 'registered', 'group'")
    assert end == f"imported {len(modules) + 1}"


@pytest.mark.parametrize("path", LIBRARY, ids=label)
def test_importing_a_module_runs_definitions_only(path):
    for node in tree(path).body:
        kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)
        documentation = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        optional = isinstance(node, ast.If) and all(isinstance(x, (*kinds, ast.Expr)) for x in node.body)
        assert isinstance(node, kinds) or documentation or optional, f"{path}:{node.lineno}: {ast.unparse(node)[:60]}"
        if isinstance(node, ast.If) and any(isinstance(x, ast.Expr) for x in node.body):
            assert ast.unparse(node.test) == "__name__ == '__main__'", f"{path}:{node.lineno}"


# ---------------------------------------------------------------------------------------------------------------------
# Errors, documentation, names


@pytest.mark.parametrize("path", [*SCRIPTS, *FORMULAS], ids=label)
def test_no_guessing_at_attributes_and_no_swallowed_errors(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("getattr", "hasattr", "setattr"), f"{path}:{node.lineno}: {node.func.id}"
        if isinstance(node, ast.ExceptHandler):
            caught = "everything" if node.type is None else ast.unparse(node.type)
            assert caught not in ("everything", "Exception", "BaseException"), f"{path}:{node.lineno}: {caught}"


@pytest.mark.parametrize("path", [p for p in LIBRARY if p != ROOT / "rl/scoring/worker.py"], ids=label)  # SystemExit
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
    names = ["--" + field.name.replace("_", "-") for field in fields(args_of(path))]
    assert len(names) > 20
    assert [name for name in names if any(option.startswith(name) for option in options)] == []


def test_the_files_that_begin_first_are_there():
    """Whoever renames one of them also says so in tests/conftest.py."""
    [longest] = [x.value for x in tree(launch.TESTS / "conftest.py").body if isinstance(x, ast.Assign)]
    names = ast.literal_eval(longest)
    assert len(set(names)) == len(names) > 20
    assert set(names) <= {path.stem for path in launch.TESTS.glob("*/test_*.py")}
