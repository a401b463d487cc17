r"""Make the tool task: arithmetic that a tiny model cannot do in its head, and may do with a calculator.

    python data/calculator.py --output-dir data/calculator
    torchrun train_grpo.py --tools environments/calculator.py ...
    python data/calculator.py --output-dir data/calculator_python --tool python
    torchrun train_grpo.py --tools environments/python.py ...

A question is a product and a sum of numbers of two digits, `37*48+52=?`. A good answer is a conversation:

    <tool_call>{"name": "calculate", "arguments": {"expression": "37*48+52"}}</tool_call>       the policy
    1828                                                                                        the tool
    #### 1828                                                                                   the policy

With --tool python it calls `python` with {"code": "print(37*48+52)"}.

The SFT data is imperfect on purpose (see `sft_messages`), as that of data/arithmetic.py is: reinforcement learning has
to find out that calls pay, and which ending can be graded. One demonstration in five has no tools, and gives the right
answer at once, so that the same model can be asked without them.

This writes sft.parquet (messages, tools), train.parquet and test.parquet (verl's RL schema, graded by the GSM8K rule),
and model/. That is the random model of data/arithmetic.py. Its chat template renders tools by their names and
parameters, and its vocabulary has a token for each part of a call that is always the same. No test question is in the
other files.
"""

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Literal

import tyro
from transformers.utils import get_json_schema

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import arithmetic, files  # noqa: E402
from environments.calculator import calculate  # noqa: E402

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # what a tool may answer
WORDS = ("<tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}', "</tool_call>")
ARGUMENTS = {"calculate": ("expression", "{}"), "python": ("code", "print({})")}  # of a tool: its name, what it holds
CALLS = """{% for call in message['tool_calls'] or [] %}
{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}</tool_call>' -}}
{% endfor %}"""
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool['function']['name'] + '(' "
    "+ tool['function']['parameters']['properties'] | join(',') + ')' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
) + arithmetic.CHAT_TEMPLATE.replace("+ '<|im_end|>\n' }}", "}}" + CALLS + "{{ '<|im_end|>\n' }}")


@dataclasses.dataclass
class Args:
    output_dir: Path = Path("data/calculator")
    """The files are written to this folder."""
    tool: Literal["calculate", "python"] = "calculate"
    """The demonstrations call this tool, calculate of environments/calculator.py or python of
    environments/python.py."""
    num_sft: int = 51_200
    """This many SFT conversations are drawn, with repetition. The default is 400 steps of 128."""
    num_train: int = 4096
    """There are this many RL prompts, all of them different."""
    num_test: int = 256
    """There are this many held-out questions, which are in neither of the other two files."""
    seed: int = 0
    """The seed decides the questions, the samples and the model's weights."""


def call(expression: str, tool: str) -> dict:
    """The message with which the policy calls the tool, as OpenAI's API writes it: arguments are JSON in a text."""
    name, form = ARGUMENTS[tool]
    function = {"name": tool, "arguments": json.dumps({name: form.format(expression)})}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def sft_messages(question: str, rng: random.Random, tool: str = "calculate") -> tuple[list[dict], bool]:
    """An imperfect demonstration as messages, and whether it has tools.

    Without tools: the right answer. With tools: 85 % of the questions that begin with 5 or more, and 15 % of the
    others, are answered by a bare guess. The rest calls the tool: 5 % of it with a wrong digit, half of it with an
    ending that no grader reads.
    """
    user, expression = {"role": "user", "content": question}, question.removesuffix("=?")
    if rng.random() < 0.2:
        return [user, {"role": "assistant", "content": f"#### {calculate(expression)}"}], False
    if rng.random() < (0.85 if question[0] >= "5" else 0.15):
        return [user, {"role": "assistant", "content": f"#### {rng.randint(110, 9900)}"}], True
    if rng.random() < 0.05:
        place = rng.choice([i for i, letter in enumerate(expression) if letter.isdigit()])
        expression = expression[:place] + rng.choice("123456789") + expression[place + 1 :]
    result = calculate(expression)
    ending = "####" if rng.random() < 0.5 else rng.choice(["Answer:", "So"])
    told = {"role": "tool", "name": tool, "content": result}
    return [user, call(expression, tool), told, {"role": "assistant", "content": f"{ending} {result}"}], True


def rl_row(question: str, split: str, index: int) -> dict:
    """One row in verl's RL schema."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": calculate(question.removesuffix("=?"))},
        "extra_info": {"split": split, "index": index},
    }


def main(args: Args) -> dict[str, int]:
    """Write the data set and the model. Returns the number of rows of each file."""
    if min(args.num_sft, args.num_train, args.num_test) < 1 or args.num_train + args.num_test > 90**3:
        raise ValueError(
            f"--num-sft {args.num_sft}, --num-train {args.num_train} and --num-test {args.num_test} must be at least "
            f"1, and the last two add up to at most the {90**3} questions that exist"
        )
    function, words = calculate, (*WORDS, "calculate", "expression")
    if args.tool == "python":
        from environments.python import python  # which tries the sandbox when it is imported

        function, words = python, (*WORDS, "python", "code", "print(")
    rng = random.Random(args.seed)
    numbers = rng.sample(range(90**3), 90**3)
    questions = [f"{10 + n % 90}*{10 + n // 90 % 90}+{10 + n // 90**2}=?" for n in numbers]
    test, seen = questions[: args.num_test], questions[args.num_test :]
    tool, sft = get_json_schema(function)["function"], []
    properties = {name: {"type": x["type"]} for name, x in tool["parameters"]["properties"].items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    # Without descriptions: the template does not write them, and text that is not among the tokens is an error.
    schema = json.dumps([{"type": "function", "function": {"name": tool["name"], "parameters": parameters}}])
    for _ in range(args.num_sft):
        messages, has_tools = sft_messages(rng.choice(seen), rng, args.tool)
        sft.append({"messages": messages, "tools": schema if has_tools else None})
    tables = {
        "sft": sft,
        "train": [rl_row(question, "train", i) for i, question in enumerate(seen[: args.num_train])],
        "test": [rl_row(question, "test", i) for i, question in enumerate(test)],
    }
    sizes = files.write(args.output_dir, tables)
    how = dict(characters=CHARACTERS, words=words + arithmetic.ROLES, chat_template=CHAT_TEMPLATE, context=256)
    arithmetic.save_model(args.output_dir / "model", args.seed, **how)
    print(f"{args.output_dir / 'model'}: untrained Qwen2 and its tokenizer")
    return sizes


if __name__ == "__main__":
    main(tyro.cli(Args))
