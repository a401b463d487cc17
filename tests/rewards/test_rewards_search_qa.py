"""rewards/search_qa.py: exact match in answer tags, with the normal form of Search-R1."""

import pytest

from rewards.search_qa import compute_score

PARIS = {"target": ["Paris", "City of Paris"]}


@pytest.mark.parametrize(
    "text, target, score",
    [
        ("<answer>Paris</answer>", "Paris", 1.0),
        ("so <answer>\n the city of PARIS. </answer> it is", PARIS["target"], 1.0),
        ("<answer>The Eiffel-Tower!</answer>", "eiffeltower", 1.0),
        ("<answer>an apple a day</answer>", "Apple   day", 1.0),
        ("<answer>London</answer> no, <answer>Paris</answer>", PARIS["target"], 1.0),
        ("<answer>Paris</answer> no, <answer>London</answer>", PARIS["target"], 0.0),
        ("<answer>Paris, France</answer>", PARIS["target"], 0.0),
        ("<answer>theory</answer>", "ory", 0.0),
        ("Paris", "Paris", 0.0),
        ("<answer>Paris", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("<answer></answer>", "Paris", 0.0),
        ("<answer>?</answer>", "The !", 0.0),  # nothing is left of either
        ("<answer>the !</answer>", "The !", 1.0),
        (10 * "<answer>Paris</answer>", "Paris", 1.0),
        (11 * "<answer>Paris</answer>", "Paris", 0.25),
        ("<answer>Paris</answer>" + 10 * "</answer>", "Paris", 0.25),
        (11 * "<answer>London</answer>", "Paris", 0.0),
    ],
)
def test_score(text, target, score):
    assert compute_score("searchR1_nq", text, {"target": target}, {"index": 0}) == score


@pytest.mark.parametrize("truth", ["Paris", None, {}, {"target": []}, {"target": [1]}, {"target": None}])
def test_a_bad_ground_truth_is_named(truth):
    with pytest.raises(ValueError, match="ground truth .*: needs a dict with target"):
        compute_score("searchR1_nq", "<answer>Paris</answer>", truth)
