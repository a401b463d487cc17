"""Make the embedded task: chains of additions and subtractions, and a tiny untrained model that learns them on a CPU.

    python data/arithmetic.py --output-dir data/arithmetic

A question is a first number and four operations, `4+3-5+2+1=?`. Every operand is 1..9 and every running total 0..9, or
0..--max-total. The full answer shows each step and ends as GSM8K's do, so the GSM8K rule grades it:

    4+3=7
    7-5=2
    2+2=4
    4+1=5
    #### 5

From a running total t the next one may be any of the nine other digits, so a chain is its five totals and there are
9 * 9**4 = 59,049 chains. The test chains appear neither in the SFT data nor among the RL prompts. They are unseen
chains of seen facts: only 90 single steps exist.

The SFT data is imperfect on purpose (see `sft_response`), so that reinforcement learning has something to find: showing
the work and ending in a form that can be graded.

Writes sft.parquet (prompt, response), train.parquet and test.parquet (verl's RL schema), and model/: a Qwen2 of
205,088 random parameters in fp32 with a character-level ChatML tokenizer.
"""

import dataclasses
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import tyro
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402

NUM_CHAINS = 9**5
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-=#?.,:!'$*/"  # 77, so 80 tokens in all
ROLES = ("system", "user", "assistant", "tool")  # words for the tokenizers of conversations
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass
class Args:
    output_dir: Path = Path("data/arithmetic")
    """The files are written to this folder."""
    num_sft: int = 57_600
    """This many SFT samples are drawn, with repetition. The default is 450 steps of 128."""
    num_train: int = 4096
    """There are this many RL prompts, all of them different."""
    num_test: int = 512
    """There are this many held-out chains, which are in neither of the other two files."""
    max_total: int = 9
    """This is the largest running total, from 9 to 99. With 19 there are 270 single steps to learn instead of 90, and
    answers are longer."""
    hinted_share: float = 0.0
    """In this share of the SFT samples the full answer stands in the prompt, behind the question, and is the response
    too. Who learns from these can read a hint, as the teacher of train_self_distill.py has to."""
    context: int = 128
    """The model takes sequences of at most this many tokens. A question with its full answer has 61. The conversations
    of examples/check_agent.py need more than 128."""
    seed: int = 0
    """The seed decides the split, the samples and the model's weights."""


def num_indices(max_total: int) -> int:
    """How many numbers `chain_totals` takes: a first number, then four times a choice of at most 18 next totals."""
    return 9 * min(max_total, 18) ** 4


def chain_totals(index: int, max_total: int = 9) -> list[int] | None:
    """The five running totals of chain `index`: a first number 1..9, then each time one of the other totals within 9.

    Up to a `max_total` of 9 there are always that many others, and every index in 0..59,048 is a chain. Beyond it their
    number depends on the total. An index that chooses one too many is not a chain, and gives None.
    """
    base, totals = min(max_total, 18), [index % 9 + 1]
    index //= 9
    for _ in range(4):
        lowest, highest = max(0, totals[-1] - 9), min(max_total, totals[-1] + 9)
        move = lowest + index % base
        move += move >= totals[-1]  # skip the total itself: no operand is 0
        if move > highest:
            return None
        totals.append(move)
        index //= base
    return totals


def question(totals: list[int]) -> str:
    """`[4, 7, 2, 4, 5]` -> `4+3-5+2+1=?`"""
    return str(totals[0]) + "".join(f"{b - a:+d}" for a, b in pairwise(totals)) + "=?"


def worked_steps(totals: list[int], stated: list[int]) -> str:
    """One line per step. `stated` are the totals the writer claims, equal to `totals` if there is no mistake."""
    steps = zip(pairwise(totals), pairwise(stated), strict=True)
    return "".join(f"{s}{b - a:+d}={t}\n" for (a, b), (s, t) in steps)


def with_one_mistake(totals: list[int], rng: random.Random, max_total: int = 9) -> list[int]:
    """Totals with one wrong step: from there on all are off by the same amount, and still in 0..max_total."""
    slips = [
        totals[:i] + [t + d for t in totals[i:]]
        for i in range(1, 5)
        for d in range(-9, 10)
        if d != 0 and all(0 <= t + d <= max_total for t in totals[i:])
    ]
    return rng.choice(slips)  # never empty: the last step alone can always be wrong


def sft_response(totals: list[int], rng: random.Random, max_total: int = 9) -> str:
    """An imperfect demonstration.

    85 % of the samples whose first number is 5 or more, and 15 % of the others, are a bare guess within 3 of the truth.
    The rest shows its work: 5 % of it with one wrong step, half of it with an ending that no grader reads.
    """
    if rng.random() < (0.85 if totals[0] >= 5 else 0.15):
        return f"#### {rng.choice([x for x in range(max_total + 1) if abs(x - totals[-1]) <= 3])}"
    stated = with_one_mistake(totals, rng, max_total) if rng.random() < 0.05 else totals
    ending = "####" if rng.random() < 0.5 else rng.choice(["Answer:", "So"])
    return worked_steps(totals, stated) + f"{ending} {stated[-1]}"


def full_answer(totals: list[int]) -> str:
    """All steps without a mistake, with the ending that is graded."""
    return worked_steps(totals, totals) + f"#### {totals[-1]}"


def hinted_row(totals: list[int]) -> dict:
    """A demonstration of reading: the prompt is `4+3-5+2+1=?` with the full answer right behind it."""
    answer = full_answer(totals)
    return {"prompt": [{"role": "user", "content": question(totals) + answer}], "response": answer}


def rl_row(totals: list[int], split: str, index: int) -> dict:
    """One row in verl's RL schema."""
    answer = full_answer(totals)
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question(totals)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(totals[-1])},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question(totals)},
    }


def make_tokenizer(
    characters: str = CHARACTERS, words: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE, context: int = 128
) -> PreTrainedTokenizerFast:
    """One token a character, and one for each of `words`, plus ChatML's special tokens.

    The characters are stored under their byte-level names ("\\n" as "Ċ", " " as "Ġ"). A folder of model type qwen2 is
    loaded with a byte-level pre-tokenizer, to which a plain "\\n" in the vocabulary would be unknown and dropped.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [byte_level.pre_tokenize_str(character)[0][0] for character in characters]
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS + names)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    backend.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def save_model(
    folder: Path,
    seed: int,
    *,
    characters: str = CHARACTERS,
    words: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    context: int = 128,
) -> None:
    """Write the tokenizer and the randomly initialized model, and check that the tokenizer survives the round trip.

    Args: context, the most tokens of a sequence; the others are those of `make_tokenizer`.
    """
    make_tokenizer(characters, words, chat_template, context).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(SPECIAL_TOKENS) + len(characters) + len(words),
        hidden_size=96,
        num_hidden_layers=2,
        intermediate_size=256,
        num_attention_heads=3,  # heads of 32: vLLM on CPU refuses a head size of 24
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>" + characters + "".join(words) + "<|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text, f"tokenizer round trip: {tokenizer.decode(ids)!r} != {text!r}"
    assert len(ids) == len(characters) + len(words) + 3, f"expected one token a character and word, got {len(ids)}"
    assert tokenizer.eos_token_id == config.eos_token_id, f"{tokenizer.eos_token_id} != {config.eos_token_id}"


def main(args: Args) -> dict[str, int]:
    """Write the data set and the model. Returns the number of rows of each file."""
    if not 9 <= args.max_total <= 99:
        raise ValueError(f"--max-total {args.max_total} must be within 9 and 99")
    rng = random.Random(args.seed)
    indices = rng.sample(range(num_indices(args.max_total)), num_indices(args.max_total))
    chains = [totals for i in indices if (totals := chain_totals(i, args.max_total)) is not None]
    if min(args.num_sft, args.num_train, args.num_test) < 1 or args.num_train + args.num_test > len(chains):
        raise ValueError(
            f"--num-sft {args.num_sft}, --num-train {args.num_train} and --num-test {args.num_test} must be at least "
            f"1, and the last two add up to at most the {len(chains)} chains that exist"
        )
    if not 0 <= args.hinted_share <= 1:
        raise ValueError(f"--hinted-share {args.hinted_share} must be within 0 and 1")
    test, seen = chains[: args.num_test], chains[args.num_test :]
    sft = [rng.choice(seen) for _ in range(args.num_sft)]
    reads = random.Random(f"{args.seed} hints")  # of its own, so that the other samples stay what they are
    plain = [
        {
            "prompt": [{"role": "user", "content": question(totals)}],
            "response": sft_response(totals, rng, args.max_total),
        }
        for totals in sft
    ]
    tables = {
        "sft": [
            hinted_row(totals) if reads.random() < args.hinted_share else row
            for totals, row in zip(sft, plain, strict=True)
        ],
        "train": [rl_row(totals, "train", i) for i, totals in enumerate(seen[: args.num_train])],
        "test": [rl_row(totals, "test", i) for i, totals in enumerate(test)],
    }
    sizes = files.write(args.output_dir, tables)
    save_model(args.output_dir / "model", args.seed, context=args.context)
    print(f"{args.output_dir / 'model'}: untrained Qwen2 and its tokenizer")
    return sizes


if __name__ == "__main__":
    main(tyro.cli(Args))
