"""The rules that keep the code readable: who may import whom, what a script may do, what must be documented.

A rule is one test, which lists every place that breaks it.
"""

import ast
import functools
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path

import launch
import torch.distributed as dist
from launch import ROOT
from torch.distributed.run import get_args_parser

from rl import flags

RL_SCRIPTS = "train_grpo train_grpo_variants train_ppo train_dapo train_reinforce train_dpo train_distill train_prime"
RL_SCRIPTS += " train_self_distill train_self_distill_variants train_async"
SCRIPTS = [ROOT / f"{name}.py" for name in [*RL_SCRIPTS.split(), "sft", "train_reward", "eval"]]  # not a user's copies
LIBRARY = sorted((ROOT / "rl").rglob("*.py"))
EXTRAS = sorted((ROOT / "extras").rglob("*.py"))
# Each room may import those before it, and the files directly in rl/.
ROOMS = ["formulas", "data", "model", "scoring", "sampling", "run"]
FORMULAS = sorted(path for path in (ROOT / "rl" / "formulas").glob("*.py") if path.stem != "__init__")
FORMULA_NAMES = {*(path.stem for path in FORMULAS), "ADVANTAGES", "DISTANCES", "LOSSES", "PAIRS"}
SCRIPT_NAMES = {path.stem for path in SCRIPTS}
LINES = {"train_grpo": 240, "train_grpo_variants": 330, "sft": 200, "train_reward": 200, "eval": 200}  # else 300
OWN_FLAGS = {"train_grpo": 20}  # at most; a variant's script may have more
BEFORE_THE_LOOP = 40  # lines of main, at most
NESTING = 4  # blocks within each other in main, at most


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names of all modules a file imports, wherever in it, with `from a import b` as a and a.b."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def top(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def at(path: Path, node: ast.AST | None = None) -> str:
    """A place in the repository, as a message names it."""
    return f"{path.relative_to(ROOT)}{f':{node.lineno}' if node is not None else ''}"


@functools.cache
def args_of(path: Path) -> type:
    """The class Args of a script."""
    return importlib.import_module(path.stem).Args


def main_of(path: Path) -> ast.FunctionDef:
    return next(node for node in tree(path).body if isinstance(node, ast.FunctionDef) and node.name == "main")


def test_the_lists_above_are_not_empty():
    assert {"train_grpo", "train_ppo", "train_dapo", "train_reinforce", "sft", "eval"} <= SCRIPT_NAMES
    assert len(LIBRARY) > 10 and set(FORMULAS) < set(LIBRARY)


def test_scripts_never_import_each_other():
    assert [at(path) for path in SCRIPTS if top(imported(path)) & SCRIPT_NAMES] == []
    assert all("rl" in top(imported(path)) for path in SCRIPTS)


def test_the_library_imports_neither_scripts_nor_rewards_nor_data_sets():
    forbidden = SCRIPT_NAMES | {"rewards", "data", "benchmarks", "tests"}
    assert [at(path) for path in LIBRARY if top(imported(path)) & forbidden] == []


def room(name: str) -> str | None:
    """The room of a module `rl.ROOM.MODULE`; None for a file directly in rl/."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def test_imports_run_one_way_through_the_rooms():
    wrong = []
    for path in LIBRARY:
        own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
        used = {room(name) for name in imported(path) if name.startswith("rl.")} - {None, own}
        earlier = set(ROOMS[: ROOMS.index(own)] if own else ())
        wrong += [f"{at(path)} imports {name}" for name in sorted(used - earlier)]
    assert wrong == []


def test_modules_import_each_other_in_no_circle():
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in LIBRARY}
    left = {name: imported(path) & names.keys() - {name, "rl"} for name, path in names.items()}
    packages = {name for name in left if any(other.startswith(f"{name}.") for other in left)}
    left = {name: used - packages | (used & {"rl.sampling.engines"}) for name, used in left.items()}
    while free := [name for name, used in left.items() if not used & left.keys()]:
        left = {name: used for name, used in left.items() if name not in free}
    assert left == {}


def test_what_keeps_a_run_alive_stands_behind_a_wall():
    """rl/run knows no formula but those of metrics."""
    wall = [path for path in LIBRARY if path.parent.name == "run"]
    assert len(wall) > 8
    for path in wall:
        assert not {name for name in imported(path) if name.startswith("rl.formulas")} or path.stem == "metrics", path


def test_no_function_outside_of_the_wall_takes_the_flags_of_a_script():
    """Functions take values or their group of flags. rl/flags.py handles Args of any script, whatever is in them."""
    wrong = []
    for path in LIBRARY:
        if path.parent.name != "run" and path != ROOT / "rl" / "flags.py":
            functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]
            wrong += [at(path, x) for x in functions if "args" in [a.arg for a in [*x.args.args, *x.args.kwonlyargs]]]
    assert wrong == []


def test_scripts_hand_values_or_groups_to_functions():
    """Only rl/run, what checks limits, and the script's own checks get all of args."""
    wrong = []
    for path in SCRIPTS:
        own = {node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)}
        takes_args = {"load_task", "open_sampler", "check", "check_limits", "Run", *own}
        for node in nodes(path):
            if isinstance(node, ast.Call):
                given = [ast.unparse(x) for x in [*node.args, *(keyword.value for keyword in node.keywords)]]
                if "args" in given and ast.unparse(node.func) not in takes_args:
                    wrong.append(at(path, node))
    assert wrong == []


def test_vllm_is_imported_by_its_own_files_only():
    users = {path.stem for path in LIBRARY if "vllm" in top(imported(path))}
    assert users == {"vllm", "vllm_weights", "vllm_worker"}
    assert not any("vllm" in top(imported(path)) for path in SCRIPTS)


def test_formulas_know_tensors_and_nothing_else():
    for path in FORMULAS:
        others = {name for name in imported(path) if not name.startswith("rl.formulas.")}
        assert top(others) <= {"math", "torch"}, at(path)
        assert not {name for name in imported(path) if name.startswith(("torch.distributed", "torch.cuda"))}, at(path)


def test_importing_a_script_runs_nothing():
    definitions = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    wrong = []
    for path in SCRIPTS:
        for node in tree(path).body:
            if isinstance(node, ast.If):
                is_right = ast.unparse(node.test) == "__name__ == '__main__'"
            elif isinstance(node, ast.Expr):
                is_right = isinstance(node.value, ast.Constant)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):  # a table of functions, not a call
                deferred = {id(x) for f in ast.walk(node) if isinstance(f, ast.Lambda) for x in ast.walk(f)}
                is_right = not [x for x in ast.walk(node) if isinstance(x, ast.Call) and id(x) not in deferred]
            else:
                is_right = isinstance(node, definitions)
            wrong += [] if is_right else [f"{at(path, node)}: {ast.unparse(node)[:60]}"]
    assert wrong == []


def test_a_script_is_args_and_main():
    for path in SCRIPTS:
        names = {node.name: node for node in tree(path).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        assert [a.arg for a in names["main"].args.args] == ["args"], at(path)
        assert ast.unparse(names["main"].returns) == "dict[str, float]", at(path)
        assert ast.unparse(names["Args"].decorator_list[0]) == "dataclass(frozen=True)", at(path)


def test_a_script_fits_in_one_reading():
    def depth(body: list[ast.stmt]) -> int:
        return max((depth_of(node) for node in body), default=0)

    def depth_of(node: ast.stmt) -> int:
        chained = isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)  # elif
        inner = 1 + max(
            depth(getattr(node, name, [])) for name in ("body", "finalbody", "orelse")[: 2 if chained else 3]
        )
        return max(inner, depth_of(node.orelse[0])) if chained else inner

    for path in SCRIPTS:
        assert len(path.read_text().splitlines()) <= LINES.get(path.stem, 300), at(path)
        main = main_of(path)
        if loops := [node.lineno for node in main.body if isinstance(node, ast.For)]:
            assert loops[0] - main.lineno <= BEFORE_THE_LOOP, at(path)
        else:
            assert path.stem == "eval"
        assert depth(main.body) - 1 <= NESTING, at(path)


# ---------------------------------------------------------------------------------------------------------------------
# Flags: those of the algorithm stand in the script, all others in groups beside the machine that reads them


def own_flags(path: Path) -> list[str]:
    """Flags of a script that are in none of its groups."""
    return [x.name for x in fields(args_of(path)) if not is_dataclass(getattr(args_of(path)(), x.name))]


def test_a_flag_stands_once():
    """In the script or in one of its groups, with a default."""
    for path in SCRIPTS:
        args = args_of(path)()
        names = [*own_flags(path)]
        for field in fields(args):
            if is_dataclass(group := getattr(args, field.name)):
                assert type(group).__module__.startswith(("rl.", "extras.")), f"{at(path)}: {field.name}"
                names += [x.name for x in fields(group)]
        assert len(names) == len(set(names)) and set(names) == flags.flat(args).keys(), at(path)
        assert len(own_flags(path)) <= OWN_FLAGS.get(path.stem, 40), at(path)


def test_a_flag_that_picks_from_a_table_has_its_choices_from_there():
    """So a row that a copy of a script adds is a choice at once."""
    picked = [(path, *found) for path in SCRIPTS for found in re.findall(r"([A-Z]+)\[args\.(\w+)\]", path.read_text())]
    assert len(picked) >= 5
    assert [x for x in picked if f"    {x[2]}: Literal[*{x[1]}] = " not in x[0].read_text()] == []


def test_every_flag_is_read():
    """As an attribute, wherever: `args.lr` in a script, `memory.fsdp_size` in the library."""
    read = {path: set(re.findall(r"\.(\w+)\b", path.read_text())) for path in [*SCRIPTS, *LIBRARY, *EXTRAS]}
    of_library = set().union(*(read[path] for path in [*LIBRARY, *EXTRAS]))
    named = {"project_name", "experiment_name"}  # getattr in a loop
    for path in SCRIPTS:
        assert flags.flat(args_of(path)()).keys() - named <= read[path] | of_library, path


def test_nobody_keeps_a_list_of_flags():
    """What a flag may be, and whether a resumed run may change it, follows from its type and where it stands."""
    names = {name for script in SCRIPTS for name in flags.flat(args_of(script)())}
    wrong = []
    for path in [*SCRIPTS, *LIBRARY]:
        for node in nodes(path):
            literals = getattr(node, "elts", []) + getattr(node, "keys", []) if not isinstance(node, ast.Call) else []
            words = [x.value for x in literals if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            if len(names & set(words)) > 2:
                wrong.append(f"{at(path, node)}: {words}")
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                listed = [word for word in node.value.split() if word in names]
                if len(set(listed)) > 2 and len(listed) >= len(node.value.split()) / 2:
                    wrong.append(f"{at(path, node)}: {node.value}")
    assert wrong == []


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


def test_every_collective_names_its_group():
    paths = [*SCRIPTS, *LIBRARY, *EXTRAS]
    assert [f"{at(path)}: {call}" for path in paths for call in unnamed_groups(path.read_text())] == []


def test_a_collective_without_a_group_is_found():
    known = set("all_reduce all_gather all_gather_object all_to_all_single broadcast barrier send recv".split())
    assert known <= COLLECTIVES.keys()
    source = "dist.all_reduce(x, group=g)\ndist.all_gather(xs, x, g)\nranks.all_gather(x)\n"
    assert unnamed_groups(source) == []
    for call in ("dist.all_reduce(x)", "dist.all_gather(xs, x)", "torch.distributed.barrier()", "dist.send(x, 1)"):
        assert unnamed_groups(source + call) == [call]


IMPORTS = """
import atexit, ctypes, importlib, os, signal, sys, threading
import zmq.utils.monitor
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


def test_importing_a_module_runs_definitions_only():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, *functions, ast.Assign, ast.AnnAssign)
    wrong = []
    for path in [*LIBRARY, *EXTRAS]:
        for node in tree(path).body:
            is_right = isinstance(node, kinds) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.If):
                is_main = ast.unparse(node.test) == "__name__ == '__main__'"
                is_right = all(isinstance(x, (*kinds, ast.Expr) if is_main else kinds) for x in node.body)
            wrong += [] if is_right else [f"{at(path, node)}: {ast.unparse(node)[:60]}"]
    assert wrong == []


# ---------------------------------------------------------------------------------------------------------------------
# Errors, documentation, names


def caught_by(node: ast.ExceptHandler) -> str:
    return "everything" if node.type is None else ast.unparse(node.type)


def test_no_guessing_at_attributes_and_no_swallowed_errors():
    wrong = []
    for path in [*SCRIPTS, *FORMULAS]:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                wrong += [at(path, node)] if node.func.id in ("getattr", "hasattr", "setattr") else []
            if isinstance(node, ast.ExceptHandler):
                wrong += [at(path, node)] if caught_by(node) in ("everything", "Exception", "BaseException") else []
    assert wrong == []


OTHERS_CODE = [ROOT / "rl/scoring/worker.py", ROOT / "extras/agents/worker.py"]  # which may raise SystemExit


def test_no_bare_except_in_the_library():
    assert [path for path in OTHERS_CODE if path not in [*LIBRARY, *EXTRAS]] == []
    handlers = [(path, node) for path in [*LIBRARY, *EXTRAS] for node in nodes(path)]
    handlers = [(p, x) for p, x in handlers if isinstance(x, ast.ExceptHandler) and p not in OTHERS_CODE]
    assert [at(path, x) for path, x in handlers if caught_by(x) in ("everything", "BaseException")] == []


def test_every_public_function_and_module_is_documented():
    wrong = []
    for path in [path for path in [*LIBRARY, *EXTRAS] if path.read_text().strip()]:
        module = tree(path)
        bodies = [module.body, *(node.body for node in module.body if isinstance(node, ast.ClassDef))]
        functions = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
        public = [node for node in functions if not node.name.startswith("_")]
        wrong += [] if ast.get_docstring(module) else [at(path)]
        wrong += [f"{at(path, node)}: {node.name}" for node in public if not ast.get_docstring(node)]
    assert wrong == [], "no docstring"


def test_every_function_of_a_script_is_documented():
    for path in SCRIPTS:
        functions = [node for node in tree(path).body if isinstance(node, ast.FunctionDef)]
        assert [at(path, node) for node in [tree(path), *functions] if not ast.get_docstring(node)] == []


def test_no_flag_is_an_abbreviation_of_a_torchrun_option():
    """`torchrun script.py --n 4` fails: torchrun reads --n as short for --nnodes and others, wherever it stands."""
    options = [option for action in get_args_parser()._actions for option in action.option_strings]
    for path in SCRIPTS:
        names = ["--" + name.replace("_", "-") for name in flags.flat(args_of(path)())]
        assert len(names) > 20
        assert [name for name in names if any(option.startswith(name) for option in options)] == [], at(path)


def test_the_files_that_begin_first_are_there():
    """Whoever renames one of them also says so in tests/conftest.py."""
    [longest] = [x.value for x in tree(launch.TESTS / "conftest.py").body if isinstance(x, ast.Assign)]
    names = ast.literal_eval(longest)
    assert len(set(names)) == len(names) > 20
    assert set(names) <= {path.stem for path in launch.TESTS.glob("*/test_*.py")}


WHAT = """
tokens prompts rows responses sequences samples pairs groups turns pushes updates steps evaluations engines ranks
numbers lines files bytes KiB MiB GiB KB MB GB seconds s ms times once twice
"""
OF_WHAT = """
step second minute GPU rank process engine row prompt response token sequence sample pair group layer parameter
update micro-batch turn node file epoch line
"""
# What is never right in a sentence of this project, and what to say instead.
NEVER_RIGHT = {
    rf"\b({'|'.join(WHAT.split())}) an? ({'|'.join(OF_WHAT.split())})\b(?!')": (
        "say `per`, or begin a clause with `that`, or put a comma between them"
    ),
    r"\bbut for\b": "say `except for`",
    r"(?i)\bso (many|much)\b(?! (that|as))": "say `this many` or `a given number of`",
    r"(?i)\blikewise\b": "say what it does, or `in the same way`",
    r"(?i)\bmend(s|ed)?\b": "say `fix`",
    r"(?i)neighbour|colour|behaviour|favour|modelling|(optim|normal|initial)is(e|ing|ation)": "spell it in American",
}


def files() -> list[Path]:
    """Every file of code and prose that people read."""
    folders = "rl extras tools examples rewards environments data benchmarks tests".split()
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += [*ROOT.glob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "docs").rglob("*.md")]
    paths += (ROOT / "docs").glob("*.py")
    return sorted(path for path in paths if path.suffix in (".py", ".md", ".toml"))


def texts() -> Iterable[tuple[str, int, str]]:
    """Every line of these files: its file, its number, and the line."""
    for path in files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield str(path.relative_to(ROOT)), number, line


def phrases_in(lines: Iterable[tuple[str, int, str]]) -> list[str]:
    """Places of phrases that are never right."""
    return [
        f"{file}:{number}: {match[0]!r}: {instead}"
        for file, number, line in lines
        for phrase, instead in NEVER_RIGHT.items()
        for match in re.finditer(phrase, line)
    ]


def test_no_sentence_has_a_phrase_that_is_never_right():
    here = "tests/scripts/test_style.py"
    assert not phrases_in(line for line in texts() if line[0] != here)


def test_phrases_that_are_never_right_are_found():
    wrong = ["takes 128 prompts a step", "once a process.", "10 ms a token", "all but for one", "rows a step sees"]
    wrong += ["after so many steps", "likewise", "Mend it.", "its neighbours", "normalised"]
    assert len(phrases_in(("x.md", i, line) for i, line in enumerate(wrong))) == len(wrong)
    right = [
        "128 prompts per step",
        "F times a step's prompts",
        "in 3 steps, a sequence ends",
        "everything but one",
        "so many that it ends",
        "a row",
    ]
    assert not phrases_in(("x.md", i, line) for i, line in enumerate(right))


# ---------------------------------------------------------------------------------------------------------------------
# Sentences: none is so long that a reader has to begin again


LONGEST = 35  # words
ABBREVIATION = re.compile(r"(\b(al|e\.g|i\.e|eq|eqs|Eq|fig|vs|Dr|cf|etc|sec|no)|^\W*\d+|\.\.)\.$")


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph. What stands between backticks is one word, whatever is in it."""
    found, words = [], []
    for word in re.sub(r"`[^`]*`", "`code`", text).split():
        words.append(word)
        if re.search(r"[.!?][\"')\]*]*$", word) and not ABBREVIATION.search(" ".join(words)):
            found, words = [*found, " ".join(words)], []
    return [*found, " ".join(words)]


def too_long(paragraphs: Iterable[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """(line, words, sentence) of each sentence that has too many words. A formula is not a word, and a sign neither."""
    lengths = [(line, len(re.findall(r"\S*\w\S*", x)), x) for line, text in paragraphs for x in sentences(text)]
    return [found for found in lengths if found[1] > LONGEST]


ITEM = re.compile(r"\s*([-*]|\d+\.) ")
LISTS = re.compile(r"(Args|Fields|Raises|Returns|Sources?): ")  # of entries, with semicolons between them


def paragraphs_of(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """(number of the first line, text) of each paragraph of some lines of prose, and of each item of a list. What is
    indented is a formula, code or a table, except for the lines of an item. So is a line with a gap of three spaces.
    """
    found: list[tuple[int, str]] = []
    is_open = in_item = False
    for number, line in lines:
        if ITEM.match(line):
            found, is_open, in_item = [*found, (number, ITEM.sub("", line, count=1))], True, True
        elif not line.strip() or re.search(r"\S {3}", line) or line.startswith(" ") and not (is_open and in_item):
            is_open = in_item = False
        elif is_open:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        else:
            found, is_open, in_item = [*found, (number, line.strip())], True, False
    entries = [(number, text.split("; ") if LISTS.match(text) else [text]) for number, text in found]
    return [(number, entry) for number, texts in entries for entry in texts]


def prose_of_code(source: str) -> list[tuple[int, str]]:
    """The paragraphs of comments, of docstrings, and of the texts below the fields of a class."""
    found: list[tuple[int, str]] = []
    block: list[tuple[int, str]] = []  # comments on lines of their own, one below the other
    columns: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), text = token.start, token.string.lstrip("#").removeprefix(" ")
            is_alone = not token.line[:column].strip()
            if block and not (is_alone and block[-1][0] == line - 1 and columns[-1] == column):
                found, block = found + paragraphs_of(block), []
            text = "" if re.fullmatch(r"[-=#]+.*", text) else text  # a rule
            block, columns = [*block, (line, text)], [*columns, column if is_alone else -1]
    found += paragraphs_of(block)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, *others = node.value.value.splitlines() or [""]
            margin = " " * node.col_offset
            lines = [first.strip(), *(line.removeprefix(margin) for line in others)]
            found += paragraphs_of(enumerate(lines, node.lineno))
    return found


def prose_of_page(text: str) -> list[tuple[int, str]]:
    """The paragraphs of a page in Markdown, without code, tables, pictures and headings."""
    lines, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.strip().startswith("```")
        is_prose = not is_code and not re.match(r"\s*([|#<!]|```)", line)
        lines.append((number, re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) if is_prose else ""))
    return paragraphs_of(lines)


def prose_of(path: Path) -> list[tuple[int, str]]:
    return prose_of_code(path.read_text()) if path.suffix == ".py" else prose_of_page(path.read_text())


def test_no_comment_docstring_or_page_has_a_long_sentence():
    paths = [path for path in files() if path.suffix in (".py", ".md")]
    assert len(paths) > 300 and {path.name for path in paths} >= {"README.md", "train_grpo.md", "train_grpo.py"}
    found = [f"{at(path)}:{line}: {words} words: {x}" for path in paths for line, words, x in too_long(prose_of(path))]
    assert not found, f"split sentences of more than {LONGEST} words"


def test_texts_of_flags_are_sentences():
    """Scripts that prepare data or measure have a text below each flag. tests/run/test_flags.py reads the others."""
    folders, wrong, count = ("data", "tools", "benchmarks"), [], 0
    for path in [path for path in files() if path.suffix == ".py" and path.parent.name in folders]:
        bodies = [x.body for x in tree(path).body if isinstance(x, ast.ClassDef) and x.name.endswith("Args")]
        texts = [x.value.value for body in bodies for x in body[1:] if isinstance(x, ast.Expr)]
        wrong += [
            f"{at(path)}: {x!r}"
            for x in texts
            if not re.fullmatch(r"([A-Z]|vLLM |[a-z_./]+\.py ).* .*\.", x, re.DOTALL)
        ]
        count += len(texts)
    assert not wrong and count > 100


WORDS, FEW = " ".join(["word"] * LONGEST), " ".join(["word"] * 20)
LONG_AND_SHORT = f"""'''{WORDS} word. {WORDS}.

    a formula = {WORDS} {WORDS}
  1. {WORDS}
     word.
name    {WORDS} {WORDS}

Args: x, {FEW}; y, {FEW}. See e.g. `{WORDS}`, eq. 7.
'''


class A:
    # {WORDS}
    # word.
    x: int  # {WORDS}
    # word.
    y: int
    '''{WORDS}

    {WORDS}
    word.
    '''
"""


def test_long_sentences_are_found():
    assert [(line, words) for line, words, _ in too_long(prose_of_code(LONG_AND_SHORT))] == [
        (13, LONGEST + 1),
        (1, LONGEST + 1),
        (4, LONGEST + 1),
        (20, LONGEST + 1),
    ]
    page = f"# {WORDS} word\n\n- {WORDS}\n  word\n\n```\n{WORDS} word\n```\n| {WORDS} | word |\n\n"
    page += f"See [it]({WORDS}). **{WORDS}.** {WORDS}.\n"
    assert [(line, words) for line, words, _ in too_long(prose_of_page(page))] == [(3, LONGEST + 1)]


if __name__ == "__main__":
    for path in files():
        for line, words, sentence in too_long(prose_of(path)) if path.suffix in (".py", ".md") else ():
            print(f"{at(path)}:{line}: {words} words: {sentence}")
