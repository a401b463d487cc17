"""Scripts repeat each other on purpose, so that each can be read alone. What they repeat must stay the same.

A block is a run of statements, without comments and spaces. Who fixes one in a script fixes it in all that have it.
"""

import ast
import re

import pytest
from launch import ROOT

FAMILY = ["train_grpo_variants", "train_dapo", "train_reinforce", "train_distill", "train_prime"]
CLIPPED = ["train_ppo", *FAMILY[1:]]  # scripts that have the clipped loss in their own lines
SELF = ["train_self_distill", "train_self_distill_variants"]
SUPERVISED = ("sft", "train_reward")
STOP = "run.may_stop_after('{}')"
# name -> scripts, of which the first is the model; the first and the last statement of the block
BLOCKS = {
    "a step begins": (
        ["train_grpo", "train_ppo", FAMILY[0], "train_reinforce", "train_distill", *SELF],
        "run.evaluate_if_due(",
        "responses = sampler.sample(",
    ),
    "clipped policy loss": (["train_grpo", *CLIPPED], "ratio = ", "pg_loss = pg_loss * weights"),
    "learning rate": (
        ["train_grpo", *FAMILY[:4], "train_dpo", *SELF],
        "lr = args.lr",
        "optimizer.param_groups[0]['lr'] = lr",
    ),
    "optimizer step": (["train_grpo", *FAMILY, "train_dpo", *SELF], "norm = clip_grad_norm(", "norms.append("),
    "end": (["train_grpo", "train_ppo", *FAMILY, "train_dpo", *SELF], "run.evaluate_if_due(", "return "),
    "step of demonstrations": (list(SUPERVISED), "norm = clip_grad_norm(", STOP.format("update")),
}
# Names that stand for another of the model.
NAMES = {"train_ppo": {"actor": "policy"}, "train_reward": {"model": "policy"}}


def statements(source: str) -> list[str]:
    """All statements of main, also those within others, one after the other; compound ones by their first line."""
    [main] = [x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef) and x.name == "main"]
    found = []

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            found.append(ast.unparse(node).splitlines()[0])
            for inner in ("body", "orelse"):
                visit(getattr(node, inner, []))

    visit(main.body)
    return found


def block(source: str, script: str, first: str, last: str) -> list[str]:
    """The statements of a block, in the names of the model script."""
    names, found, inside = NAMES.get(script, {}), [], False
    for line in statements(source):
        line = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), line)
        if line.startswith(first):
            found, inside = [], True  # the last run that begins so, up to its end
        if inside:
            found.append(line)
        if inside and line.startswith(last):
            return found
    raise AssertionError(f"{script}.py has no block from {first!r} to {last!r}")


def read(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


CASES = [(name, script) for name, (scripts, _, _) in BLOCKS.items() for script in scripts[1:]]


@pytest.mark.parametrize(("name", "script"), CASES, ids=str)
def test_what_scripts_repeat_is_the_same(name, script):
    scripts, first, last = BLOCKS[name]
    model = block(read(scripts[0]), scripts[0], first, last)
    assert block(read(script), script, first, last) == model, f"{script}.py and {scripts[0]}.py: fix both"


@pytest.mark.parametrize("name", BLOCKS)
def test_a_line_that_is_mended_in_one_script_only_is_noticed(name):
    scripts, first, last = BLOCKS[name]
    model = block(read(scripts[0]), scripts[0], first, last)
    source = ast.unparse(ast.parse(read(scripts[1])))
    same = {value: key for key, value in NAMES.get(scripts[1], {}).items()}
    for line in model[1:-1]:
        own = re.sub(r"\w+", lambda word: same.get(word[0], word[0]), line)
        fixed = own[:-1] + " + 0" + own[-1] if own.endswith(")") else own + " + 0" if "=" in own else None
        if fixed is not None:
            assert own in source, own
            assert block(source.replace(own, fixed), scripts[1], first, last) != model, own


@pytest.mark.parametrize("script", ["train_grpo", "train_ppo", *FAMILY, "train_dpo"])
def test_the_phases_stand_in_their_order(script):
    found = list(dict.fromkeys(re.findall(r"^ +# (\d)[ab]?\. ", read(script), re.MULTILINE)))
    assert found == [str(i) for i in range(1, 7)]
