import random
import re
from collections import Counter
from itertools import pairwise

import launch
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from data import arithmetic
from extras.demonstrations.encode import encode_demonstration
from extras.demonstrations.rows import read_demonstrations
from rewards.gsm8k import compute_score
from rl.data.encode import encode_prompts
from rl.data.rows import read_rows

SIZES = {"num_sft": 3000, "num_train": 200, "num_test": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("arithmetic")
    assert arithmetic.main(arithmetic.Args(output_dir=path, **SIZES)) == {"sft": 3000, "train": 200, "test": 512}
    return path


def true_result(question):
    """The value of `4+3-5+2+1=?` by other means than the script's."""
    assert re.fullmatch(r"[1-9]([+-][1-9]){4}=\?", question)
    return sum(int(number) for number in re.findall(r"[+-]?\d", question))


def test_some_demonstrations_read_the_answer_in_the_prompt_and_the_others_stay_what_they_are(folder, tmp_path):
    arithmetic.main(arithmetic.Args(output_dir=tmp_path, hinted_share=0.25, **SIZES))
    for name in ("train", "test"):
        assert pq.read_table(tmp_path / f"{name}.parquet") == pq.read_table(folder / f"{name}.parquet")
    both = zip(*(pq.read_table(x / "sft.parquet").to_pylist() for x in (folder, tmp_path)), strict=True)
    hinted = [(old, new) for old, new in both if old != new]
    assert 0.2 < len(hinted) / 3000 < 0.3
    for old, new in hinted:
        [asked], [said] = old["prompt"], new["prompt"]
        answer = said["content"].removeprefix(asked["content"])
        assert said["role"] == "user" and new["response"] == answer and answer.count("\n") == 4
        assert answer.endswith(f"#### {true_result(asked['content'])}")
    with pytest.raises(ValueError, match="--hinted-share 1.5 must be within 0 and 1"):
        arithmetic.main(arithmetic.Args(output_dir=tmp_path, hinted_share=1.5))


def test_chains_are_all_different_and_stay_in_range():
    chains = {tuple(arithmetic.chain_totals(i)) for i in range(arithmetic.NUM_CHAINS)}
    assert len(chains) == 59_049
    for totals in chains:
        assert len(totals) == 5 and totals[0] >= 1 and all(0 <= t <= 9 for t in totals)
        assert all(a != b for a, b in pairwise(totals))


def test_question_and_steps():
    totals = [4, 7, 2, 4, 5]
    assert arithmetic.question(totals) == "4+3-5+2+1=?"
    assert arithmetic.worked_steps(totals, totals) == "4+3=7\n7-5=2\n2+2=4\n4+1=5\n"
    assert arithmetic.worked_steps(totals, [4, 7, 3, 5, 6]) == "4+3=7\n7-5=3\n3+2=5\n5+1=6\n"


def test_one_mistake_is_one_wrong_step():
    rng = random.Random(0)
    for i in rng.sample(range(arithmetic.NUM_CHAINS), 2000):
        totals = arithmetic.chain_totals(i)
        lines = arithmetic.worked_steps(totals, arithmetic.with_one_mistake(totals, rng)).split()
        assert sum(eval(line.replace("=", "==")) for line in lines) == 3
        assert all(re.fullmatch(r"\d[+-]\d=\d", line) for line in lines)


def test_demonstrations_follow_the_recipe():
    rng = random.Random(0)
    counts = Counter()
    for _ in range(20_000):
        totals = arithmetic.chain_totals(rng.randrange(arithmetic.NUM_CHAINS))
        response = arithmetic.sft_response(totals, rng)
        big = totals[0] >= 5
        counts["big" if big else "small"] += 1
        if match := re.fullmatch(r"#### (\d)", response):
            counts["guess", big] += 1
            assert abs(int(match[1]) - totals[-1]) <= 3
            counts["lucky"] += int(match[1]) == totals[-1]
        else:
            assert re.fullmatch(r"(\d[+-]\d=\d\n){4}(####|Answer:|So) \d", response)
            counts["worked"] += 1
            counts["graded"] += "####" in response
            counts["wrong"] += not response.startswith(arithmetic.worked_steps(totals, totals))
    assert counts["guess", True] / counts["big"] == pytest.approx(0.85, abs=0.015)
    assert counts["guess", False] / counts["small"] == pytest.approx(0.15, abs=0.015)
    assert counts["graded"] / counts["worked"] == pytest.approx(0.5, abs=0.02)
    assert counts["wrong"] / counts["worked"] == pytest.approx(0.05, abs=0.01)


def test_held_out_chains_are_seen_nowhere(folder):
    train, test = (read_rows(folder / f"{name}.parquet") for name in ("train", "test"))
    sft = read_demonstrations(folder / "sft.parquet")
    questions = [[row["prompt"][0]["content"] for row in rows] for rows in (sft, train, test)]
    assert [len(q) for q in questions] == [3000, 200, 512]
    assert len(set(questions[1])) == 200 and len(set(questions[2])) == 512
    assert not set(questions[2]) & (set(questions[0]) | set(questions[1]))


def test_rl_rows_are_right(folder):
    rows = read_rows([folder / "train.parquet", folder / "test.parquet"])
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        assert truth == str(true_result(row["prompt"][0]["content"]))
        assert compute_score(row["data_source"], row["extra_info"]["answer"], truth, row["extra_info"]) == 1.0
        assert (row["data_source"], row["ability"], row["reward_model"]["style"]) == ("arithmetic", "math", "rule")
    assert [row["extra_info"]["index"] for row in rows] == [*range(200), *range(512)]


def test_tokenizer_round_trip_is_one_token_a_character(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for text in ("4+3=7\n7-5=2\n#### 5", "\n", " ", "0123456789", "+-=#?", "Answer: So", arithmetic.CHARACTERS):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text)
    assert tokenizer.decode(tokenizer("\n\n")["input_ids"]) == "\n\n"
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 0)
    assert tokenizer.bos_token_id is None
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1=?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"


def test_prompts_and_demonstrations_encode_to_known_lengths(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = encode_prompts(tokenizer, read_rows(folder / "train.parquet"), max_prompt_length=30)
    assert {len(row["prompt_ids"]) for row in rows} == {30}
    for row in read_demonstrations(folder / "sft.parquet")[:200]:
        ids, mask = encode_demonstration(tokenizer, row, max_length=128)
        learned = [token for token, m in zip(ids, mask, strict=True) if m]
        assert tokenizer.decode(learned) == row["response"] + "<|im_end|>"
        assert mask == [0] * 30 + [1] * (len(row["response"]) + 1)
        if row["response"].count("\n") == 4 and "####" in row["response"]:
            assert len(learned) == 31


def test_model_is_the_stated_one(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert sum(p.numel() for p in model.parameters()) == 205_088
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.max_position_embeddings == 128
    assert model.config.eos_token_id == 2
    assert GenerationConfig.from_pretrained(folder / "model").eos_token_id == 2


def test_longer_conversations_fit_into_a_larger_context_and_the_weights_stay_what_they_are(folder, tmp_path):
    arithmetic.main(arithmetic.Args(output_dir=tmp_path, context=192, **SIZES))
    models = [AutoModelForCausalLM.from_pretrained(x / "model") for x in (folder, tmp_path)]
    assert [x.config.max_position_embeddings for x in models] == [128, 192]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").model_max_length == 192
    weights, more = (x.state_dict() for x in models)
    assert weights.keys() == more.keys() and all(torch.equal(weights[name], more[name]) for name in weights)


def test_everything_is_a_function_of_the_seed(folder, tmp_path):
    files = ["sft.parquet", "train.parquet", "test.parquet", "model/model.safetensors", "model/tokenizer.json"]
    state = torch.random.get_rng_state()
    for seed in (0, 1):
        arithmetic.main(arithmetic.Args(output_dir=tmp_path / str(seed), seed=seed, **SIZES))
    assert torch.equal(torch.random.get_rng_state(), state)
    same = [(folder / f).read_bytes() == (tmp_path / "0" / f).read_bytes() for f in files]
    changed = [(folder / f).read_bytes() != (tmp_path / "1" / f).read_bytes() for f in files]
    assert same == [True] * 5
    assert changed == [True] * 4 + [False]


def test_runs_as_a_script_from_anywhere(tmp_path):
    flags = ["--num-sft", "5", "--num-train", "4", "--num-test", "3"]
    out = launch.run_elsewhere(arithmetic.__file__, *flags, cwd=tmp_path)
    assert re.search(r"test\.parquet: 3 rows, sha256 [0-9a-f]{64}\n", out)
    assert pq.read_table(tmp_path / "data/arithmetic/train.parquet").num_rows == 4


@pytest.mark.parametrize("sizes", [{"num_test": 0}, {"num_train": 59_000}, {"num_train": -1}, {"num_sft": 0}])
def test_sizes_that_cannot_be(sizes, tmp_path):
    with pytest.raises(ValueError, match=next(iter(sizes)).replace("num_", "--num-")):
        arithmetic.main(arithmetic.Args(output_dir=tmp_path, **sizes))
