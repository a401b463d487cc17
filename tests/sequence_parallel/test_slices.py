"""Ranks that each compute a slice of the tokens must give the numbers of one process, or refuse the model."""

import helpers_families as families
import helpers_scripts as h
import launch
import pytest
from helpers_data import ranks_without_group
from helpers_parallel import FULL, SELECTIVE, assert_as_one_process, measure, names

import train_distill
import train_grpo
import train_ppo
import train_prime
import train_reward
from extras.sequence_parallel import groups, share_rows
from extras.sequence_parallel.groups import check_heads
from rl.flags import build, flat
from rl.run.training import check

REPLAY = {"kind": "experts", "replays": True}

# Number of ranks -> changes of `sliced_ranks.Case` by name. All rows are prompts and responses, some of which begin
# alike, in three micro-batches of two or three rows.
CASES = {
    2: {
        "nothing recomputed": {"degree": 2},
        "LoRA, recomputed": {"degree": 2, "lora": True} | FULL,
        "windows, one key head": {"degree": 2, "kind": "window", "key_heads": 1} | SELECTIVE,
        "router replay, offloaded": {"degree": 2, "param_offload": True} | REPLAY,
        "compiled": {"degree": 2, "compile": True} | SELECTIVE,
    },
    4: {
        "an empty micro-batch": {"degree": 2},
        "one row, two copies": {"degree": 2, "rows": 1, "fsdp_size": 2},
        "LoRA, one key head": {"degree": 4, "key_heads": 1, "lora": True} | SELECTIVE,
        "router replay": {"degree": 4} | REPLAY,
        "latent attention": {"degree": 4, "kind": "latent attention", "key_heads": 8} | FULL,
    },
}
MORE = {
    2: {
        "recomputed": {"degree": 2} | FULL,
        "experts": {"degree": 2, "kind": "experts"} | SELECTIVE,
        "latent attention": {"degree": 2, "kind": "latent attention", "key_heads": 8},
        "scaled logits": {"degree": 2, "kind": "scaled logits"},
        "offloaded": {"degree": 2, "param_offload": True} | FULL,
        "five micro-batches": {"degree": 2, "tokens": 60},
        "one row": {"degree": 2, "rows": 1},
        "LoRA, four copies": {"degree": 2, "lora": True, "fsdp_size": 1},
        "compiled windows": {"degree": 2, "kind": "window", "compile": True},
        "float64": {"degree": 2, "dtype": "float64"},
    },
    4: {
        "not divided": {"degree": 1},
        "compiled": {"degree": 4, "compile": True} | FULL,
        "as many key heads": {"degree": 4, "key_heads": 4},
        "more key heads": {"degree": 4, "key_heads": 8} | SELECTIVE,
        "one row": {"degree": 4, "rows": 1},
        "three rows, recomputed": {"degree": 2, "rows": 3} | FULL,
        "LoRA, four copies": {"degree": 2, "lora": True, "fsdp_size": 1},
        "windows": {"degree": 4, "kind": "window"},
        "scaled logits": {"degree": 4, "kind": "scaled logits", "param_offload": True},
        "float64": {"degree": 4, "dtype": "float64", "key_heads": 1},
    },
}


@pytest.fixture(scope="module")
def measured():
    wrong = {"a loss that is too large": {"degree": 2, "wrong": True}}
    return measure({2: CASES[2] | wrong, 4: CASES[4]})


@pytest.fixture(scope="module")
def measured_more():
    return measure(MORE)


@pytest.mark.parametrize("case", names(CASES), ids=str)
def test_slices_give_the_numbers_of_one_process(measured, case):
    assert_as_one_process(measured[case])


@pytest.mark.thorough
@pytest.mark.parametrize("case", names(MORE), ids=str)
def test_more_slices_give_the_numbers_of_one_process(measured_more, case):
    assert_as_one_process(measured_more[case])


def test_these_cases_have_empty_micro_batches_and_several(measured):
    """Rows of each micro-batch, by data rank."""
    assert measured[4, "an empty micro-batch"]["rows"] == [[2, 3], [3, 0]]
    assert measured[4, "one row, two copies"]["rows"] == [[1], [0]]
    assert measured[2, "nothing recomputed"]["rows"] == measured[4, "router replay"]["rows"] == [[2, 3, 3]]


def test_compiled_layers_have_one_graph_for_all_lengths(measured):
    compiled = measured[2, "compiled"]
    assert compiled["graphs"] == compiled["graphs_of_first"] > 0 and compiled["graph_breaks"] == 0


def test_a_loss_that_is_too_large_by_the_degree_would_be_noticed(measured):
    found = measured[2, "a loss that is too large"]
    assert found["gradients"] == pytest.approx(1, abs=1e-6) and found["norm"] == pytest.approx(2, abs=1e-6)
    with pytest.raises(AssertionError):
        assert_as_one_process(found)


# --- what is refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of models by their family."""
    return families.Made(lambda name: families.save(name, tmp_path_factory.mktemp("model")))


REFUSED = {
    "capped scores": "its attention uses softcap, which packed attention does not compute",
    "convolutions": "its layers carry a state from token to token",
    "delta nets": "its layers carry a state from token to token",
    "Mamba-2 of Granite": "its layers carry a state from token to token",
    "distances instead of positions": "it has an attention of its own",
    "attention without options": "its attention is not told where sequences begin",
}


@pytest.mark.parametrize("name", h.some(families.FAMILIES, *families.FEW, "attention without options"))
def test_models_that_cannot_be_sliced_are_refused_by_their_config(saved, name):
    if families.FAMILIES[name][2] in (families.PACKED, families.OWN_HEAD):
        groups.check_model(saved[name], 2, flag="--model")
    else:
        reason = REFUSED.get(name, "its layers carry a state from token to token")
        with pytest.raises(ValueError) as error:
            groups.check_model(saved[name], 2, flag="--critic-model")
        fix = "choose another size, or leave the flag out"
        assert str(error.value) == (
            f"--critic-model {saved[name]} cannot be sliced by --sequence-parallel-size 2: {reason}; {fix}"
        )


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "problem"),
    [
        (8, 8, 4, ""),
        (8, 2, 2, ""),
        (8, 2, 8, ""),  # four ranks get the same head of keys
        (8, 1, 4, ""),
        (7, 7, 2, "2 does not divide its 7 attention heads"),
        (6, 2, 4, "4 does not divide its 6 attention heads"),
        (12, 3, 2, "2 neither divides its 3 heads of keys nor is a multiple of that number"),
    ],
)
def test_heads_that_cannot_be_divided(heads, key_heads, size, problem):
    if not problem:
        check_heads(heads, key_heads, size)
    else:
        with pytest.raises(ValueError, match=f"^{problem}$"):
            check_heads(heads, key_heads, size)


def refusal(args):
    """What four ranks say to the flags of a script."""
    with pytest.raises(ValueError) as error:
        share_rows(ranks_without_group(0, 4), args)
    return str(error.value)


@pytest.mark.parametrize(
    ("script", "flag", "changes"),
    [
        (train_grpo, "model", {}),
        (train_ppo, "critic_model", {}),
        (train_prime, "prm_model", {}),
        (train_distill, "teacher_model", {}),
        (train_grpo, "reward_model", {}),
    ],
)
def test_every_model_of_a_run_has_to_have_heads_that_can_be_divided(saved, tiny_model, script, flag, changes):
    models = {"model": saved["short windows"]} | {flag: tiny_model}  # which has three heads, and one of keys
    said = refusal(build(script.Args, **models, sequence_parallel_size=2, **changes))
    name = f"--{flag.replace('_', '-')} {tiny_model}"
    assert said.startswith(f"{name} cannot be sliced by --sequence-parallel-size 2: 2 does not divide its 3 attention")


def test_a_number_of_ranks_that_cannot_be_divided():
    said = "--sequence-parallel-size 3 does not divide the 4 rank(s); choose a divisor"
    assert refusal(build(train_grpo.Args, sequence_parallel_size=3)) == said


def test_the_loss_that_evens_out_experts_needs_whole_rows(saved):
    flags = dict(model=saved["experts"], router_aux_loss_coef=0.01, sequence_parallel_size=2)
    assert refusal(build(train_grpo.Args, **flags)) == (
        "--router-aux-loss-coef 0.01 needs all tokens of a row on one rank, and --sequence-parallel-size 2 divides "
        "them; leave one of them out"
    )


def test_one_rank_for_each_row_is_the_default(tiny_model):
    ranks = ranks_without_group(3, 4)
    assert share_rows(ranks, build(train_grpo.Args, model=tiny_model)) is ranks
    assert (ranks.data_rank, ranks.data_size, ranks.sequence_size) == (3, 4, 1)


@pytest.mark.parametrize(
    ("script", "lengths", "limit", "unit"),
    [
        (
            train_grpo,
            dict(max_prompt_length=21, max_response_length=30),
            26,
            "one sequence of (--max-prompt-length + --max-response-length)",
        ),
        (train_reward, dict(max_length=25), 25, "one pair of 2 x --max-length"),
    ],
)
def test_ranks_hold_a_sequence_together(saved, tmp_path, script, lengths, limit, unit):
    """The limit of tokens is that of a rank, and has to hold its slice: 51 / 2 rounded up, or 2 * 25 / 2."""
    args = build(script.Args, model=saved["short windows"], default_local_dir=str(tmp_path), **lengths)
    name = next(flag for flag in flat(args) if flag.endswith("max_token_len_per_gpu"))
    args = build(script.Args, **flat(args) | {"sequence_parallel_size": 2, name: limit - 1})
    with pytest.raises(ValueError) as error:
        check(args)
    flag = f"--{name.replace('_', '-')} {limit - 1}"
    assert str(error.value) == (
        f"{flag} cannot hold {unit} / --sequence-parallel-size 2 = {limit} tokens; raise it to that"
    )
    assert set(build(script.Args, **flat(args) | {name: limit}).units.values()) == {limit}


def test_models_that_see_images_are_refused(tmp_path):
    """Only the text part is sliced."""
    launch.run_file("tests/sequence_parallel/seeing.py", tmp_path)
