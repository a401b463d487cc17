"""Ranks that divide experts must give the numbers of one process, or refuse the model."""

import helpers_families as families
import launch
import pytest
from helpers_parallel import FULL, SELECTIVE, assert_as_one_process, measure, names

import train_grpo
from extras.expert_parallel import check
from rl.flags import build

DIVIDED = launch.TESTS / "expert_parallel" / "divided_ranks.py"
TWO, FOUR = ({"kind": "eight experts", "expert_parallel_size": E} for E in (2, 4))

# Number of ranks -> changes of `sliced_ranks.Case` by name. With four ranks and a degree of 1, one has no rows.
CASES = {
    4: {
        "nothing recomputed": TWO | {"degree": 1},
        "four ranks, recomputed": FOUR | FULL | {"degree": 1},
        "slices": FOUR | SELECTIVE | {"degree": 2},
        "router replay, a rank whose experts get no token": FOUR | {"degree": 1, "replays": True, "rows": 1},
        "LoRA, offloaded": TWO | {"degree": 1, "lora": True, "param_offload": True},
    },
}
MORE = {
    2: {
        "nothing recomputed": TWO | {"degree": 1},
        "recomputed": TWO | FULL | {"degree": 1},
        "slices, router replay": TWO | SELECTIVE | {"degree": 2, "replays": True},
        "compiled": TWO | {"degree": 1, "compile": True},
        "compiled, recomputed": TWO | FULL | {"degree": 1, "compile": True},
    },
    4: {
        "slices": TWO | {"degree": 2, "rows": 3},
        "as many slices": FOUR | FULL | {"degree": 4, "key_heads": 4, "replays": True},
        "offloaded": FOUR | {"degree": 1, "param_offload": True},
        "LoRA": FOUR | SELECTIVE | {"degree": 1, "lora": True},
    },
}


@pytest.fixture(scope="module")
def measured():
    return measure({4: CASES[4] | {"a loss that is too large": FOUR | {"degree": 1, "wrong": True}}})


@pytest.fixture(scope="module")
def measured_more():
    return measure(MORE)


@pytest.mark.parametrize("case", names(CASES), ids=str)
def test_divided_experts_give_the_numbers_of_one_process(measured, case):
    assert_as_one_process(measured[case])


@pytest.mark.thorough
@pytest.mark.parametrize("case", names(MORE), ids=str)
def test_more_divided_experts_give_the_numbers_of_one_process(measured_more, case):
    assert_as_one_process(measured_more[case])


def test_a_loss_that_is_too_large_by_the_degree_would_be_noticed(measured):
    found = measured[4, "a loss that is too large"]
    assert found["gradients"] == pytest.approx(3, abs=1e-6) and found["norm"] == pytest.approx(4, abs=1e-6)
    with pytest.raises(AssertionError):
        assert_as_one_process(found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of models by their family."""
    return families.Made(lambda name: families.save(name, tmp_path_factory.mktemp("model")))


def test_steps_checkpoints_and_what_an_engine_gets_are_those_of_whole_experts(saved, tmp_path):
    """At E = 1, 2 and 4, on four ranks. What was saved at 2 is loaded at each of them."""
    output = launch.run_file(DIVIDED, saved["eight experts"], tmp_path, nproc=4)
    [found] = launch.objects(output, "norms")
    assert found["experts"] == [8, 4, 2]  # of a rank
    assert found["weights"] == found["loaded"] == [0, 0, 0]
    assert found["norms"] == pytest.approx([found["norms"][0]] * 3, rel=1e-6) and found["norms"][0] > 1
    assert found["moved"] > 0.01 and max(found["steps"]) < 1e-5


REFUSED = {
    "leave one of them out": dict(fsdp_size=1),
    "--lora-experts exclude each other; leave one of them out": dict(lora_rank=8, lora_experts=True),
    "does not divide the 4 rank(s); choose a divisor": dict(expert_parallel_size=3),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_flags_that_exclude_each_other(saved, reason):
    args = build(train_grpo.Args, **dict(model=saved["eight experts"], expert_parallel_size=2) | REFUSED[reason])
    with pytest.raises(ValueError) as error:
        check(args, 4)
    assert str(error.value).startswith("--expert-parallel-size ") and str(error.value).endswith(reason)


def test_models_whose_experts_cannot_be_divided(saved):
    for name, reason in {
        "short windows": "needs a mixture of experts, and {} has no experts; drop it",
        "experts": "--expert-parallel-size 2: 4 ranks do not divide the 6 experts of {}; leave it out",
    }.items():
        with pytest.raises(ValueError) as error:
            check(build(train_grpo.Args, model=saved[name], expert_parallel_size=2), 4)
        assert str(error.value).endswith(reason.format(saved[name]))
    check(build(train_grpo.Args, model=saved["short windows"]), 4)
    check(build(train_grpo.Args, model=saved["experts"], expert_parallel_size=2), 2)
