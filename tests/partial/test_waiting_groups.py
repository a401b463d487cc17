"""Groups that wait for a later step of train_dapo.py: no change of the number of ranks loses one, or doubles it."""

import helpers_scripts as h
import launch
import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import train_dapo
from extras.engines import hf
from extras.partial import waiting_groups
from rl.data.encode import load_prompts
from rl.data.template import load_tokenizer
from rl.flags import build
from rl.model import load as models
from rl.ranks import Ranks
from rl.run import checkpoint, loop_state


def comparable():
    """Responses depend on prompts and weights alone, and all that ranks change is rounding at double precision."""
    hf.Engine.step, models.load_pretrained = h.step_by_prompt(), h.load_in_double()
    Qwen2RMSNorm.forward = h.norm_in_double


@pytest.fixture(scope="module")
def train(task, tmp_path_factory):
    """train(name, steps, ranks) continues the run of that name up to this many steps, on this many ranks."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name, steps, ranks):
        changes = dict(total_training_steps=steps, save_freq=1, gen_batch_size=7, alarms=())
        settings = h.dapo_settings(task, folder / name, **changes)
        forked = launch.fork("train_dapo", settings, folder / "log", fault=comparable, ranks=ranks)
        assert forked.ends() == [0] * ranks, forked.log.read_text()[-6000:]
        return folder / name

    return run


@pytest.fixture(scope="module")
def unbroken(train):
    """Folder of a run of three steps on one rank."""
    return train("unbroken", 3, 1)


def waiting(path):
    """The groups in a checkpoint as lists of responses, each from the only rank that has its tokens; and the draws."""
    states, groups = checkpoint.load_states(path), {}
    for state in states:
        for g, group in enumerate(state["surplus"]):
            for j, x in enumerate(group):
                if x["response_ids"] is not None:
                    assert (g, j) not in groups, "two ranks have its tokens"
                    groups[g, j] = x
    sizes = {tuple(map(len, state["surplus"])) for state in states}
    assert len(sizes) == 1 and set(groups) == {(g, j) for g, n in enumerate(*sizes) for j in range(n)}
    (drawn,) = {state["drawn"] for state in states}
    return drawn, [groups[key] for key in sorted(groups)]


def assert_same_groups(path, other):
    (drawn, some), (drawn_too, others) = waiting(path), waiting(other)
    assert drawn == drawn_too and len(some) == len(others)
    for a, b in zip(some, others, strict=True):
        for name in ("row_index", "num_response_tokens", "num_sampled", "finish_reason", "outcome"):
            assert a[name] == b[name], name
        assert a["score"][1:4] == b["score"][1:4]
        for name in ("prompt_ids", "response_ids", "response_mask"):
            assert a[name].tolist() == b[name].tolist()
        assert a["columns"]["versions"].tolist() == b["columns"]["versions"].tolist()
        np.testing.assert_allclose(a["rollout_logprobs"], b["rollout_logprobs"], atol=1e-5)


@pytest.mark.parametrize("ranks", h.some([(2, 1, 2), (1, 2, 1), (2, 2, 3)], (2, 1, 2)), ids=str)
def test_every_step_may_have_its_own_number_of_ranks(train, unbroken, ranks):
    for step in (1, 2, 3):
        folder = train(f"ranks {ranks}", step, ranks[step - 1])
        assert len(checkpoint.load_states(folder / f"global_step_{step}")) == ranks[step - 1]
        assert_same_groups(folder / f"global_step_{step}", unbroken / f"global_step_{step}")
    lines, expected = (h.timeless(h.read_jsonl(x / "metrics.jsonl")) for x in (folder, unbroken))
    assert [x["train/surplus_groups"] > 0 for x in expected[:2]] == [True, True]  # or nothing has waited
    assert expected[1]["train/num_sampled_responses"] == 4 * 7 * expected[1]["train/num_gen_batches"]
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-6)
    one, other = (h.weights(x / "global_step_3") for x in (folder, unbroken))
    assert h.distance(one, other) < 1e-6
    assert h.distance(one, h.weights(unbroken / "global_step_2")) > 1e-4


def rows_of(task):
    args = build(train_dapo.Args, **h.dapo_settings(task, "nowhere"))
    rows, _ = load_prompts(args.data, load_tokenizer(args.model), args.max_prompt_length)
    return {row["row_index"]: row for row in rows}


def saved(path):
    """What every rank has saved of the groups that wait."""
    return [state["surplus"] for state in checkpoint.load_states(path)]


def of_rank(rank, size):
    return Ranks(rank, size, torch.device("cpu"), torch.float32, rank, size, group=None, data_group=None)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_groups_of_all_ranks_are_shared_out_anew(unbroken, task, size):
    """Each goes to one rank, in their order and evenly, and comes back the same from whichever ranks had it."""
    rows, states = rows_of(task), saved(unbroken / "global_step_1")
    whole = waiting_groups.from_states(states, rows, 4, of_rank(0, 1))
    assert len(whole) == len(states[0]) >= 2 and all(x.response_ids is not None for group in whole for x in group)
    of_ranks = [waiting_groups.from_states(states, rows, 4, of_rank(rank, size)) for rank in range(size)]
    owners = [[{x.rank for x in group} for group in groups] for groups in of_ranks]
    assert all(each == owners[0] for each in owners) and all(len(owner) == 1 for owner in owners[0])
    order = [next(iter(owner)) for owner in owners[0]]
    counts = [order.count(rank) for rank in range(size)]
    assert order == sorted(order) and max(counts) - min(counts) <= 1
    for rank, groups in enumerate(of_ranks):
        assert all((x.response_ids is not None) == (x.rank == rank) for group in groups for x in group)
        numbers = [(x.rank, x.number) for group in groups for x in group]
        assert len(set(numbers)) == len(numbers)  # they name a response
    states = [waiting_groups.to_state(groups) for groups in of_ranks]
    encoded = [loop_state.encode({"surplus": state}) for state in states]
    assert [bool(state.arrays) for state in encoded] == [True] * size
    merged = waiting_groups.from_states(states, rows, 4, of_rank(0, 1))
    for group, other in zip(merged, whole, strict=True):
        for a, b in zip(group, other, strict=True):
            assert (a.row_index, a.score, a.num_response_tokens) == (b.row_index, b.score, b.num_response_tokens)
            for name in ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs"):
                assert np.array_equal(vars(a)[name], vars(b)[name])


def test_groups_of_another_size_or_of_other_data_are_left_out(unbroken, task):
    rows, states = rows_of(task), saved(unbroken / "global_step_1")
    waited = [group[0]["row_index"] for group in states[0]]
    assert waiting_groups.from_states(states, rows, 3, of_rank(0, 1)) == []
    missing = {index: row for index, row in rows.items() if index != waited[0]}
    other_prompt = [1 + rows[waited[1]]["prompt_ids"][0], *rows[waited[1]]["prompt_ids"][1:]]
    changed = rows | {waited[1]: rows[waited[1]] | {"prompt_ids": other_prompt}}
    for data, left_out in ((missing, waited[0]), (changed, waited[1])):
        kept = waiting_groups.from_states(states, data, 4, of_rank(0, 1))
        assert [group[0].row_index for group in kept] == [index for index in waited if index != left_out]
    assert waiting_groups.from_states([], rows, 4, of_rank(0, 1)) == []
