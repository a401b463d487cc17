"""Responses that come with the rows of a step stand beside those that were sampled."""

from helpers_data import response

from extras.demonstrations.given import side_by_side


def test_given_responses_stand_before_those_of_their_own_row_also_if_a_step_has_it_twice():
    """A group of an epoch's end may be complete with one of the next epoch's beginning."""

    rows = [{"row_index": i} for i in (7, 3, 7)]
    given, sampled = (
        [response(row_index=row["row_index"], number=k * i + j) for i, row in enumerate(rows) for j in range(k)]
        for k in (1, 2)
    )
    found = side_by_side(given, sampled, rows)
    assert [(x.row_index, x.number) for x in found] == [
        (7, 0),
        (7, 0),
        (7, 1),
        (3, 1),
        (3, 2),
        (3, 3),
        (7, 2),
        (7, 4),
        (7, 5),
    ]
    assert side_by_side([], sampled, rows) == sampled and side_by_side(given, [], rows) == given
