"""The documentation against the code: commands parse; flags, functions and metrics exist; nothing is left out."""

import ast
import dataclasses
import importlib
import re
import shlex
import shutil
import sys
from types import ModuleType

import helpers_families as families
import helpers_scripts as h
import launch
import pytest
import torch
import tyro
from helpers_flags import commands, parsed
from launch import ROOT
from torch.distributed.run import get_args_parser

from extras.samplers.protocol import TOKEN
from rl.console import SHOWN
from rl.flags import SWITCH, build, check_limits, flat, marked
from rl.formulas import advantages, losses

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "rewards" / "sandbox" / "README.md"]
FRONT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
FRONT_PAGES += sorted((ROOT / "tests").glob("*.md"))
FRONT_PAGES += sorted((ROOT / "benchmarks" / "results").glob("*.md"))
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
TORCHRUN = {option for action in get_args_parser()._actions for option in action.option_strings}
ALGORITHMS = ["train_grpo", "train_ppo", "train_dapo", "train_reinforce", "train_dpo", "train_distill", "train_prime"]
ALGORITHMS += ["train_self_distill"]
LOGGED = [*ALGORITHMS, "train_grpo_variants", "train_self_distill_variants", "train_async"]
PAGE_OF = {script: f"{script}.md" for script in LOGGED} | {"train_grpo_variants": "variants.md"}
PAGE_OF["train_self_distill_variants"] = "train_self_distill.md"
SCRIPT_OF = {page.removesuffix(".md"): script for script, page in PAGE_OF.items()}
DATA = [f"data/{path.stem}" for path in sorted((ROOT / "data").glob("*.py")) if path.stem != "files"]
OTHERS = {"--kill-on-bad-exit", "--requeue", "--signal", "--fix", "--long"}  # of Slurm, ruff and memory_table.py
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")

# Right or wrong by parity, with parts, so that an untrained model earns both and every kind of metric is logged.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = (sum(map(ord, solution_str)) + int(ground_truth)) % 2
    return {"score": float(right), "acc": float(right), "style": 0.5}
"""

# What every conversation with an environment logs, and a number of its own.
GAME = """
class Environment:
    def step(self, reply):
        return None, 0.5

    def report(self):
        return {"tries": 1}
"""


def module_of(script: str) -> ModuleType:
    """The module of a path such as data/gsm8k.py."""
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


def flags(script: str) -> set[str]:
    """All spellings of a script's flags, those of its groups among them."""
    defaults: dict[str, object] = {}
    switches: set[str] = set()
    for field in dataclasses.fields(module_of(script).Args):
        is_group = dataclasses.is_dataclass(field.default)
        defaults |= flat(field.default) if is_group else {field.name: field.default}
        switches |= marked(field.default, SWITCH) if is_group else set()
    switches |= {name for name, value in defaults.items() if isinstance(value, bool)}
    return {f"--{name}".replace("_", "-") for name in [*defaults, *(f"no_{name}" for name in switches)]}


def without_blocks(text: str) -> str:
    """A page without what stands between lines of three backticks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """What stands between backticks, outside of blocks."""
    return re.findall(r"`([^`]+)`", without_blocks(text))


def section(text: str, title: str) -> str:
    """From a heading to the next one of the same or a higher level."""
    level, rest = re.search(rf"^(#+) {re.escape(title)}.*?\n(.*)", text, re.DOTALL | re.MULTILINE).groups()
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


COPY = "train_my_idea.py"  # the reader's own copy of train_grpo.py
COMMANDS = [
    (page, line.replace(COPY, "train_grpo.py"))
    for page in [ROOT / "README.md", *PAGES]
    for line in commands(page.read_text())
]


def test_every_page_is_tested():
    folders = "docs tests benchmarks rewards rl extras data environments examples tools".split()
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    assert sorted(pages) == sorted([*FRONT_PAGES, *PAGES])


def test_commands_are_found():
    assert {page.name for page, _ in COMMANDS} >= {"README.md", "train_grpo.md", "train_ppo.md", "train_dapo.md"}
    assert len(COMMANDS) > 30
    front_page = (ROOT / "README.md").read_text()
    assert f"cp train_grpo.py {COPY}\n    python {COPY} --model runs/demo/" in front_page


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page.stem}-{line[:60]}" for page, line in COMMANDS])
def test_a_command_is_one_that_its_script_accepts(page, line):
    words = shlex.split(line, comments=True)
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    assert (ROOT / words[at]).is_file()
    script = module_of(words[at])
    if words[at].startswith(("data/", "tools/")) or line == COMMANDS[0][1]:
        args = tyro.cli(script.Args, args=words[at + 1 :], config=(tyro.conf.OmitArgPrefixes,))  # exits if it refuses
    else:
        args = parsed(script.Args, words[at + 1 :])
    check_limits(args)
    if "validate" in vars(script):
        script.validate(args)


def unknown_flags(text: str, script: str | None) -> set[str]:
    """Flags between backticks that do not exist. A span that names a script means its flags, others those of `script`
    (None: of any), or of torchrun.
    """
    everywhere = set().union(*(flags(name) for name in [*SCRIPTS, *DATA]))
    missing = set()
    for span in spans(text):
        named = re.search(r"\b((?:data/)?\w+)\.py\b", span)
        meant = named[1] if named and named[1] in {*SCRIPTS, *DATA} else script
        known = (flags(meant) if meant else everywhere) | TORCHRUN | OTHERS
        missing |= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", span)) - known
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page):
    assert unknown_flags(page.read_text(), SCRIPT_OF.get(page.stem)) == set()


def test_a_flag_of_another_script_would_be_found():
    assert unknown_flags("a `--critic-lr`, see `train_ppo.py --gamma 1`", "train_grpo") == {"--critic-lr"}
    assert unknown_flags("`--overlong-buffer`, `--no-filter-groups`, `--lr`", None) == {"--overlong-buffer"}
    assert unknown_flags("`data/word_problems.py --hinted-share 1 --lr 1`", "train_grpo") == {"--lr"}


@pytest.mark.parametrize("name", [name for name in LOGGED if name != "train_grpo"])
def test_a_page_explains_the_flags_that_train_grpo_does_not_have(name):
    own = flat(module_of(name).Args()).keys() - flat(module_of("train_grpo").Args()).keys()
    text = (ROOT / "docs" / PAGE_OF[name]).read_text()
    assert own
    assert [flag for flag in own if f"`--{flag.replace('_', '-')}" not in text] == []


def deviations(header: str) -> list[str]:
    """What a script's header says after "Where this departs from the paper": numbered items, or items that a semicolon
    ends.
    """
    said = re.search(r"Where\s+this\s+departs\s+from\s+the\s+papers?\b[^:]*:(.*?)(?:\n\n|$)", header, re.DOTALL)[1]
    items = re.split(r"\s(?=\d\. )", said.strip()) if re.match(r"\s*1\. ", said) else said.split(";")
    return [" ".join(item.split()) for item in items]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_has_the_deviations_of_its_script_under_the_same_numbers(name):
    header, page = module_of(name).__doc__, (ROOT / "docs" / f"{name}.md").read_text()
    in_header, in_page = deviations(header), re.findall(r"^(\d)\. ", section(page, "Deviations"), re.MULTILINE)
    numbers = [item[0] for item in in_header if re.match(r"\d\. ", item)]  # some headers have them
    assert numbers in ([], in_page)
    assert in_page == [str(i + 1) for i in range(len(in_header))] and len(in_page) >= 3
    assert set(ARXIV.findall(header)) <= set(ARXIV.findall(page))


def test_the_worked_numbers_of_grpo_are_right():
    page = " ".join((ROOT / "docs" / "train_grpo.md").read_text().split())
    mean, std = advantages.group_mean_std(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    found = ((torch.tensor([1.0, 0.0, 0.0, 1.0]) - mean) / (std + 1e-6)).flatten().tolist()
    assert f"standard deviation (with G - 1 = 3 in the denominator) is {std.item():.3f}" in page and mean.item() == 0.5
    assert "the advantages are " + ", ".join(f"{x:.3f}" for x in found) in page
    rows = re.findall(r"\| (-?0\.866) \| ([\d.]+) \| (\S+) \| (\S+) \| (\S+) \| (\w+)", page)
    assert len(rows) == 7
    for advantage, ratio, free, bounded, said, happens in rows:
        A, logp = torch.tensor([[float(advantage)]]), torch.tensor([[float(ratio)]]).log().requires_grad_()
        expected = -A.item() * float(ratio), -A.item() * min(max(float(ratio), 0.8), 1.2)
        assert (float(free), float(bounded)) == pytest.approx(expected, abs=6e-4)
        loss, _ = losses.ppo_clip(
            logp, 0 * logp.detach(), A, torch.ones(1, 1), clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0
        )
        loss.sum().backward()
        assert float(said) == pytest.approx(loss.item(), abs=6e-4)
        assert happens == ("clipped" if logp.grad == 0 and float(ratio) < 2 else "dual" if logp.grad == 0 else "pushed")
    kl = losses.kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), "k3").item()
    assert f"With l = -1.0 and l_ref = -1.5 this is {kl:.3f}." in page


def anchors(text: str) -> set[str]:
    """The names under which GitHub finds the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in [*FRONT_PAGES, *PAGES]:
        for target in re.findall(r"\]\(([^):]+)\)", without_blocks(page.read_text())):
            path, _, anchor = target.partition("#")
            path = page.parent / path if path else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path.read_text()), f"{page.name}: {target}"


def sentences(text: str) -> list[str]:
    """The sentences of a page outside of headings, tables and code. Items of a list are sentences of their own, and
    links have their texts only.
    """
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", without_blocks(text)):
        if not block.startswith(("|", "#", "<!--", "    ")):
            plain = re.sub(r"\]\([^)]*\)", "]", " ".join(block.split()))
            found += re.split(r"(?<=[.!?])[)*\"]*\s+", plain)
    return found


def long_sentences(text: str) -> list[str]:
    """Those with more than 35 words. A word has a letter or a digit."""
    return [x for x in sentences(text) if len([word for word in x.split() if re.search(r"\w", word)]) > 35]


@pytest.mark.parametrize("page", [*FRONT_PAGES, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_sentence_has_at_most_35_words(page):
    assert long_sentences(page.read_text()) == []


def test_long_sentences_are_found():
    words = ["word"] * 35
    assert sentences("# A b.\n\nOne [two](x.md#a-b) three. Four!\n\n- Five\n  six\n- 7\n\n| no |\n\n    no no\n") == [
        "One [two] three.", "Four!", "- Five six", "- 7",
    ]  # fmt: skip
    assert long_sentences(" ".join([*words, "-", "="]) + ".") == []
    assert long_sentences("A b. " + " ".join([*words, "last."])) == [" ".join([*words, "last."])]


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def test_the_page_that_teaches_grpo_is_short():
    """What teaches GRPO can be handed out in a lecture. The other pages have the words that their readers need."""
    assert len((ROOT / "docs" / "train_grpo.md").read_text().splitlines()) <= 150


def test_no_page_is_too_long_for_one_sitting():
    """Words are counted as `wc -w` does, with tables and commands."""
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in [*FRONT_PAGES, *PAGES]}
    assert len(words) > 25
    assert {page: number for page, number in words.items() if number > 3000} == {}


def test_rows_of_a_table_stand_together_under_a_header_and_are_equally_long():
    for page in [*FRONT_PAGES, *PAGES]:
        for block in without_blocks(page.read_text()).split("\n\n"):
            table = [line for line in block.splitlines() if line.startswith("|")]
            if table:
                assert re.fullmatch(r"\|[-| ]+\|", "".join(table[1:2])), f"{page.name}: no header above {table[0]}"
                cells = {row: len(re.findall(r"(?<!\\)\|", row)) for row in table}
                assert len(set(cells.values())) == 1, f"{page.name}: {cells}"


# ---------------------------------------------------------------------------------------------------------------------
# where formulas come from

FORMULAS = "advantages turns losses correction ratios preference distillation implicit_reward schedule critic".split()
# Parts of other formulas, which have no source of their own.
PARTS = {"with_rest", "all_pairs", "at_turns", "at_turn_ends", "fixed_values", "weights"}
SOURCE = re.compile(r"\b\d{4}\.\d{5}\b|\bSource: .")


def test_every_formula_names_its_source():
    """A paper by its number, or another source, in the docstring of each public function of the formulas."""
    sources = {}
    for path in [*(ROOT / "rl").rglob("*.py"), *(ROOT / "extras").rglob("*.py")]:
        for x in ast.parse(path.read_text()).body if path.stem in FORMULAS else ():
            if isinstance(x, ast.FunctionDef) and not x.name.startswith("_"):
                sources[x.name] = SOURCE.search(" ".join((ast.get_docstring(x) or "").split()))
    assert len(sources) > 30
    assert {name for name, source in sources.items() if source is None} == PARTS


# ---------------------------------------------------------------------------------------------------------------------
# metrics.md


def documented(text: str) -> set[str]:
    """Names in the first column of the tables; `a/mean`, `/max` stands for a/mean and a/max."""
    names: list[str] = []
    for cell in re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE):
        for span in spans(cell):
            names.append(names[-1].rsplit("/", 1)[0] + span if span.startswith("/") else span)
    return set(names)


def fits(name: str, pattern: str) -> bool:
    """Whether a logged name is a documented one, in which <...> stands for anything without a slash."""
    return re.fullmatch(re.sub(r"<\w+>", "[^/]+", re.escape(pattern)), name) is not None


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> dict[str, set[str]]:
    """Names of the metrics that a run of each script logs, with all that adds metrics switched on."""
    folder = tmp_path_factory.mktemp("metrics")
    task = h.make_task(folder)
    (folder / "parts.py").write_text(REWARD)
    both_kl = dict(use_kl_loss=True, use_kl_in_reward=True)
    common = dict(total_training_steps=1, val_before_train=True, custom_reward_function=(str(folder / "parts.py"),))
    common |= dict(val_n=2, val_temperature=1.0)
    changes = {"train_grpo": dict(use_kl_loss=True), "train_grpo_variants": both_kl, "train_ppo": both_kl}
    (folder / "game.py").write_text(GAME)
    with_game = dict(environment=str(folder / "game.py"), max_response_length=24)
    changes["train_ppo"] = both_kl | with_game
    changes["train_grpo_variants"] = both_kl | with_game | {"echo_coef": 0.1}
    changes |= {"train_dapo": {}, "train_dpo": {}}
    shutil.copytree(task.model, folder / "experts")
    families.save("experts", folder / "experts")
    changes["train_grpo"] |= dict(model=str(folder / "experts"), router_replay=True)
    changes["train_reinforce"] = dict(use_kl_loss=True, adv_estimator="remax")
    (folder / "ask_twice.py").write_text(
        (ROOT / "docs" / "agents.md").read_text().split("```python\n")[1].partition("```")[0]
    )
    with_agent = dict(agent=f"{sys.executable} {folder / 'ask_twice.py'}", max_response_length=90)
    changes["train_distill"] = dict(loss_mode="jsd", teacher_model=task.model) | with_agent
    changes["train_prime"] = {}
    changes["train_self_distill"] = dict(hint_template=r"{prompt}\n{hint}", max_hinted_prompt_length=80)
    changes["train_self_distill_variants"] = changes["train_self_distill"] | dict(hint_from="group", teacher="ema")
    (port,), changes["train_async"] = launch.free_ports(1), dict(samplers=0, use_kl_loss=True, total_training_steps=3)
    changes["train_async"]["sampler_address"] = address = f"tcp://127.0.0.1:{port}"
    launch.fork("extras.samplers.sampler", {"connect": address, "token": "metrics"}, folder / "sampler.log", ranks=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names = {}
    for script, change in changes.items():
        settings = h.grpo_settings(task, folder / script, ppo_mini_batch_size=2, save_freq=0, **common | change)
        module = module_of(script)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN, "metrics")
            module.main(build(module.Args, **settings))
        h.leave_distributed()
        names[script] = set().union(*h.read_jsonl(folder / script / "metrics.jsonl"))
    sft = module_of("sft")
    settings = h.sft_settings(
        task, folder / "sft", val_files=(h.few_rows(task.sft, folder),), total_training_steps=1, save_freq=0
    )
    sft.main(build(sft.Args, **settings))
    h.leave_distributed()
    names["sft"] = set().union(*h.read_jsonl(folder / "sft" / "metrics.jsonl"))
    torch.set_num_threads(threads)
    return {script: found - {"step", "time"} for script, found in names.items()}


METRICS = (ROOT / "docs" / "metrics.md").read_text()
TRAINING = section(METRICS, "Reinforcement learning")
SFT_REWARD_EVAL = (ROOT / "docs" / "sft_reward_eval.md").read_text()
SUPERVISED = section(SFT_REWARD_EVAL, "Metrics of sft.py")


@pytest.mark.parametrize("script", [*LOGGED, "sft"])
def test_every_metric_of_a_run_is_documented(logged, script):
    patterns = documented(SUPERVISED if script == "sft" else TRAINING)
    assert len(logged[script]) > 5 and len(patterns) > 5
    assert [name for name in sorted(logged[script]) if not any(fits(name, p) for p in patterns)] == []


@pytest.mark.parametrize("scripts", [LOGGED, ["sft"]], ids="-".join)
def test_every_documented_metric_is_one_of_a_run(logged, scripts):
    patterns = documented(SUPERVISED if scripts == ["sft"] else TRAINING)
    names = set().union(*(logged[script] for script in scripts))
    absent = {p for p in patterns if not any(fits(name, p) for name in names)}
    assert {p for p in absent if not p.startswith("memory_gb/")} == set()  # these are there on CUDA only


def test_every_name_of_a_metric_in_the_code_is_documented():
    """Also of those that no short run logs. A name in the code is a text such as actor/lr, perhaps with <...> in it."""
    patterns, found = documented(METRICS + SFT_REWARD_EVAL), set()
    kinds = {pattern.partition("/")[0] for pattern in patterns if "/" in pattern}
    for path in (*(ROOT / "rl").rglob("*.py"), *(ROOT / f"{script}.py" for script in (*LOGGED, "sft", "train_reward"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                texts = [x.value for x in node.keys if isinstance(x, ast.Constant) and isinstance(x.value, str)]
                found |= {x for x in texts if re.fullmatch(rf"({'|'.join(kinds)})/[a-z0-9_@/]+", x)}
    assert len(found) > 60 and "reward_model/dpo_acc" in found
    assert sorted(x for x in found if not any(fits(x, pattern) for pattern in patterns)) == []


@pytest.mark.parametrize(
    ("title", "script"),
    [
        ("Critic", "train_ppo"),
        ("Dynamic sampling", "train_dapo"),
        ("Baselines", "train_reinforce"),
        ("Pairs", "train_dpo"),
        ("Teacher", "train_distill"),
        ("Implicit", "train_prime"),
        ("Samplers", "train_async"),
    ],
)
def test_a_section_of_one_script_holds_metrics_that_the_others_do_not_have(logged, title, script):
    names = documented(section(TRAINING, title))
    assert names and names <= logged[script]
    assert not any(names & found for other, found in logged.items() if other != script)


def test_metrics_says_what_each_step_prints():
    said = " ".join((ROOT / "docs" / "metrics.md").read_text().split())
    said = said[said.index("Each step prints") :][:600].replace(" or ", " ")
    for name, form in SHOWN.items():
        label = form[: form.index(" {")]
        assert re.search(rf"`{re.escape(label)}`( is)?( `[\w/]+`)* `{name}`", said), (label, name)


def test_how_tables_are_read():
    table = "| name | x |\n|---|---|\n| `a/mean`, `/max` | `no/name` |\n| `r/<data_source>/<part>` | |\n"
    assert documented(table) == {"a/mean", "a/max", "r/<data_source>/<part>"}
    assert fits("r/gsm8k/acc", "r/<data_source>/<part>") and not fits("r/gsm8k", "r/<data_source>/<part>")
    assert anchors("# A `b-c`: d, e?\n```\n# f\n```\n") == {"a-b-c-d-e"}
    assert section("# a\n1\n## b\n2\n### c\n3\n## d\n4\n", "b") == "2\n### c\n3\n"
