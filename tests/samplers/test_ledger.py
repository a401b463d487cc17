"""The ledger of train_async.py: whatever happens to samplers, each prompt is trained once, in order and in time."""

import copy
import json
import random

import pytest

from extras.samplers.ledger import Leases, Ledger, assign
from rl.run import loop_state


def test_numbers_are_drawn_as_far_as_staleness_allows():
    ledger = Ledger(batch_size=4, max_staleness=0, total_steps=9)
    assert not ledger.has_batch and ledger.batch == []
    ledger.draw(0)
    assert ledger.waiting == [0, 1, 2, 3]
    ledger.draw(0)
    assert ledger.waiting == [0, 1, 2, 3]
    ledger = Ledger(batch_size=4, max_staleness=2, total_steps=9)
    ledger.draw(5)
    assert ledger.waiting == list(range(20, 32)) and ledger.next == 32  # resumed at step 5, without a state
    ledger.draw(8)
    assert ledger.next == 36  # all that the run trains on


def test_a_sampler_that_is_lost_before_the_first_push_draws_nothing():
    ledger = Ledger(batch_size=2, max_staleness=1, total_steps=9)
    assert ledger.give_back("a") == [] and ledger.waiting == []
    ledger.draw(5)  # resumed at step 5, without a state
    assert ledger.waiting == [10, 11, 12, 13]


ALL = {x: 9 for x in "abc"}  # rooms


def begun(leases, sampler, number):
    """The sampler has this number, and has confirmed it."""
    leases.lease(number, sampler)
    leases.confirm(sampler, [*leases.confirmed, number])
    assert number in leases.confirmed


def lose(leases, number, times):
    """The number loses this many samplers that had confirmed it."""
    return [leases.give_back(name) for name in "xyz"[:times] if begun(leases, name, number) is None]


def test_a_lost_number_is_handed_out_before_others_and_its_late_result_is_thrown_away():
    ledger = Ledger(batch_size=2, max_staleness=1, total_steps=9)
    ledger.draw(0)
    for number, sampler in enumerate("aba"):
        ledger.lease(number, sampler)
    assert ledger.held_by("a") == [0, 2] and ledger.give_back("a") == []
    assert ledger.waiting == [0, 2, 3] and ledger.losses == {}  # the sampler had not confirmed any
    assert assign([(ledger, 9)], {"b": 20}, ()) == [("b", 0)]  # room for two groups, and it has one
    assert not ledger.finish(0, "a", "late")
    assert ledger.finish(0, "b", "first") and not ledger.finish(0, "b", "second")
    assert not ledger.has_batch  # 1 is missing, and 2 would not do
    assert ledger.finish(1, "b", "one") and ledger.has_batch
    assert ledger.take() == {0: "first", 1: "one"}
    assert ledger.batch == [2, 3]


def test_only_what_a_sampler_has_begun_is_blamed_and_only_for_losses_without_a_reason():
    ledger = Ledger(batch_size=3, max_staleness=0, total_steps=9)
    ledger.draw(0)
    for number in (0, 1, 2):
        ledger.lease(number, "a")
    ledger.confirm("a", [1, 2, 7])  # 7 was never leased to it
    assert ledger.confirmed == {1, 2}
    ledger.confirm("a", [1])  # it has finished 2, and the group is on its way
    ledger.confirm("b", [0, 1])
    assert ledger.confirmed == {1}
    assert ledger.give_back("a") == [] and ledger.losses == {1: ["a"]} and ledger.confirmed == set()
    begun(ledger, "b", 1)
    assert ledger.give_back("b", blame=False) == [] and ledger.losses == {1: ["a"]}  # it was asked to end
    begun(ledger, "c", 1)
    assert ledger.give_back("c") == [] and ledger.is_suspect(1)
    ledger.forgive("a")  # it is back: only its network was away
    assert not ledger.is_suspect(1) and ledger.losses == {1: ["c"]}
    ledger.forgive("c")
    assert ledger.losses == {}


def test_a_prompt_that_was_lost_twice_is_leased_alone_and_dropped_if_that_sampler_is_lost_too():
    ledger = Ledger(batch_size=2, max_staleness=0, total_steps=9)
    ledger.draw(0)
    assert lose(ledger, 0, 2) == [[], []] and ledger.waiting == [0, 1]
    assert assign([(ledger, 1)], {"a": 9}, {"a"}) == [("a", 0)]  # and not 1
    assert ledger.give_back("a") == [] and ledger.waiting == [0, 1]  # it was gone before it began
    assert assign([(ledger, 1)], {"a": 9}, {"a"}) == [("a", 0)]
    ledger.confirm("a", [0])
    assert ledger.give_back("a", blame=False) == []
    begun(ledger, "a", 0)
    assert ledger.give_back("a") == [0]
    assert ledger.batch == [1, 2] and (ledger.next, ledger.num_dropped, ledger.losses) == (3, 1, {})
    assert lose(ledger, 1, 2) == [[], []]
    begun(ledger, "a", 1)
    assert ledger.finish(1, "a", "innocent") and ledger.finish(2, "b", "") is False
    begun(ledger, "b", 2)
    ledger.finish(2, "b", "other")
    assert ledger.take() == {1: "innocent", 2: "other"} and ledger.losses == {}


def test_a_suspect_waits_for_the_sampler_with_the_fewest_leases_which_gets_nothing_else():
    ledger = Ledger(batch_size=8, max_staleness=0, total_steps=9)
    ledger.draw(0)
    assert lose(ledger, 3, 2) == [[], []]
    for number, sampler in ((0, "a"), (1, "a"), (2, "b")):
        begun(ledger, sampler, number)
    rooms = {"a": 3, "b": 3}
    assert assign([(ledger, 1)], rooms, ()) == [("a", 4)]  # b has fewer and gets none
    ledger.finish(2, "b", "")
    assert assign([(ledger, 1)], rooms, ()) == []  # it has not said that it has nothing: it may not know yet
    assert assign([(ledger, 1)], rooms, {"b"}) == [("b", 3)]
    assert assign([(ledger, 1)], rooms, {"b"}) == []
    ledger.finish(0, "a", "")
    assert assign([(ledger, 1)], rooms, {"b"}) == [("a", 5)]
    ledger.finish(3, "b", "")
    assert assign([(ledger, 1)], rooms, {"b"}) == [("b", 6), ("b", 7)]


@pytest.mark.parametrize("count", [1, 3])
def test_several_suspects_share_few_samplers_and_others_do_not_starve(count):
    """Also if a suspect is held out, and if one sampler dies at each: the other prompts are trained."""
    evaluation, ledger = Leases(range(-4, 0)), Ledger(batch_size=8, max_staleness=0, total_steps=9)
    ledger.draw(0)
    guilty = {-3, 1, 2}
    for leases, numbers in ((evaluation, (-4, -3)), (ledger, (1, 2, 5))):
        assert all(lose(leases, number, 2) == [[], []] for number in numbers)
    names, pools, dropped = [f"s{i}" for i in range(count)], [(evaluation, 1), (ledger, 2)], []
    for _tick in range(99):
        idle = {x for x in names if not evaluation.held_by(x) and not ledger.held_by(x)}
        for sampler, number in assign(pools, dict.fromkeys(names, 4), idle):
            (ledger if number >= 0 else evaluation).confirm(sampler, range(-9, 99))
            held = evaluation.held_by(sampler) + ledger.held_by(sampler)
            assert len(held) == 1 or not any(x.is_suspect(n) for x in (evaluation, ledger) for n in held)
        for i, sampler in enumerate(list(names)):
            if guilty & {*evaluation.held_by(sampler), *ledger.held_by(sampler)}:
                dropped += evaluation.give_back(sampler) + ledger.give_back(sampler)
                names[i] = f"{sampler}'"
            else:
                for leases in (evaluation, ledger):
                    [leases.finish(number, sampler, "") for number in leases.held_by(sampler)[:1]]
    assert set(dropped) == guilty and sorted(evaluation.ready) == [-4, -2, -1]
    assert sorted(ledger.ready) == [0, 3, 4, 5, 6, 7, 8, 9] and ledger.num_dropped == 2


def test_those_with_the_most_room_left_get_what_waits_and_held_out_prompts_go_first():
    evaluation, ledger = Leases([-2, -1]), Ledger(batch_size=8, max_staleness=0, total_steps=9)
    ledger.draw(0)
    found = assign([(evaluation, 1), (ledger, 2)], {"a": 8, "b": 4}, ())
    assert found == [("a", -2), ("b", -1), ("a", 0), ("a", 1), ("b", 2), ("a", 3)]
    assert assign([(evaluation, 1), (ledger, 2)], {"a": 8, "b": 4}, ()) == []
    assert assign([(ledger, 2)], {}, ()) == [] and ledger.waiting == [4, 5, 6, 7]
    assert assign([(ledger, 99)], {"c": 1}, ()) == [("c", 4)]  # one group always has room


def test_losses_are_in_a_checkpoint_and_older_ones_have_none():
    ledger = Ledger(batch_size=2, max_staleness=1, total_steps=9)
    ledger.draw(0)
    lose(ledger, 1, 2)
    begun(ledger, "a", 1)  # alone, when the trainer dies
    ledger.lease(0, "b")
    ledger.finish(0, "b", "done")
    state = loop_state.encode({"ledger": ledger.state()})
    state = json.loads(state.text)["ledger"]
    other = Ledger(batch_size=2, max_staleness=1, total_steps=9)
    other.load(state, {0: "done"})
    assert other.losses == {1: ["x", "y"]} and other.is_suspect(1) and other.waiting == [1, 2, 3]
    assert assign([(other, 1)], {"a": 9, "b": 1}, {"a", "b"}) == [("a", 1), ("b", 2)]
    assert other.state() | {"unfinished": []} == ledger.state() | {"unfinished": []}
    old = Ledger(batch_size=2, max_staleness=1, total_steps=9)
    old.load({name: x for name, x in state.items() if name != "losses"}, {0: "done"})
    assert old.losses == {} and old.waiting == [1, 2, 3]


class Model:
    """What the ledger promises, from the log of events alone."""

    def __init__(self):
        self.holder, self.begun, self.lost, self.dropped = {}, {}, {}, set()

    def lose(self, sampler, blame):
        """Numbers that have to be dropped now."""
        hopeless = set()
        for number in [n for n, x in self.holder.items() if x == sampler]:
            del self.holder[number]
            if self.begun.pop(number, False) and blame:
                hopeless |= {number} if len(self.lost.get(number, [])) >= 2 else set()
                self.lost.setdefault(number, []).append(sampler)
        self.dropped |= hopeless
        return hopeless


def random_events(seed):
    """Samplers join, confirm, are lost or asked to end and come back, results come late and twice, and the trainer is
    killed and resumed. An independent model says who holds what, and what has to be dropped. Returns how many suspects
    were leased, and how many dropped.
    """
    chance = random.Random(seed)
    P, S, room = chance.choice([1, 3, 4]), chance.choice([0, 1, 4]), chance.choice([1, 3, 8])
    calm = chance.choice([0.75, 0.65])  # the rest up to 0.82 are losses
    ledger, version, model = Ledger(P, S, 9999), 0, Model()
    trained, drawn_at = [], {}
    late: list[tuple[int, str]] = []  # results that may still come, also of samplers that were lost
    saved, num_alone = None, 0

    def note_drawn():
        for number in [*ledger.waiting, *ledger.leased, *ledger.ready]:
            drawn_at.setdefault(number, version)

    def lose(sampler, blame):
        assert set(ledger.give_back(sampler, blame=blame)) == model.lose(sampler, blame)
        note_drawn()

    ledger.draw(0)
    note_drawn()
    for _ in range(1500):
        event = chance.random()
        sampler = chance.choice("abc")
        if event < 0.4:
            names = chance.sample("abc", chance.randint(1, 3))
            idle = {x for x in names if x not in model.holder.values()}
            for name, number in assign([(ledger, 1)], dict.fromkeys(names, room), idle):
                assert number not in model.holder and name in names
                model.holder[number] = name
                late.append((number, name))
                num_alone += len(model.lost.get(number, [])) >= 2
            assert all(list(model.holder.values()).count(name) <= room for name in names)
            suspects = {n for n, lost in model.lost.items() if len(lost) >= 2} - model.dropped
            for number in suspects & model.holder.keys():
                assert list(model.holder.values()).count(model.holder[number]) == 1, "a suspect is alone"
            empty = [x for x in names if x not in model.holder.values()]
            assert not (suspects.intersection(ledger.waiting) and empty), "a suspect waits for no free sampler"
        elif event < 0.55:
            held = [n for n, x in model.holder.items() if x == sampler]
            some = [n for n in held if chance.random() < 0.8]
            ledger.confirm(sampler, [*some, 10**6])
            model.begun |= {n: n in some for n in held}
        elif event < calm and late:
            number, holder = late.pop(chance.randrange(len(late)))
            expected = model.holder.get(number) == holder
            assert ledger.finish(number, holder, (number, holder)) == expected
            if expected:
                del model.holder[number]
                model.begun.pop(number, None)
            if chance.random() < 0.2:
                assert not ledger.finish(number, holder, "again")
        elif event < 0.82:
            lose(sampler, blame=chance.random() < 0.8)
        elif event < 0.83:
            ledger.forgive(sampler)
            model.lost = {n: [x for x in lost if x != sampler] for n, lost in model.lost.items()}
        elif event < 0.85:
            late = [x for x in late if chance.random() < 0.5]  # lost on the way, or with their sampler
            for lost in "abc":
                if {n for n in ledger.held_by(lost)} - {n for n, who in late if who == lost}:
                    lose(lost, blame=True)
        elif event < 0.88:  # a checkpoint at the beginning of the step
            kept = copy.deepcopy((version, trained, drawn_at, model))
            saved = kept, json.loads(json.dumps(ledger.state())), dict(ledger.ready)
        elif event < 0.9 and saved is not None:  # killed, and resumed from it
            (version, trained, before, model), state, ready = copy.deepcopy(saved)
            ledger, late = Ledger(P, S, 9999), []
            model.holder, model.begun = {}, {}
            ledger.load(state, {n: g for n, g in ready.items() if chance.random() < 0.8})
            drawn_at = {n: before[n] for n in ledger.ready} | dict.fromkeys(ledger.waiting, version)
            ledger.draw(version)
            note_drawn()
        elif ledger.has_batch:
            batch = ledger.take()
            assert len(batch) == P and all(group[0] == number for number, group in batch.items())
            # Drawn at version d and trained at version v: weights of d or later have sampled it.
            assert all(version - drawn_at[number] <= S for number in batch)
            trained += batch
            version += 1
            ledger.draw(version)
            note_drawn()
        places = [*ledger.waiting, *ledger.leased, *ledger.ready, *trained, *model.dropped]
        assert sorted(places) == list(range(ledger.next)), "each number that was drawn is in exactly one place"
        assert ledger.leased == model.holder and ledger.confirmed == {n for n, x in model.begun.items() if x}
        trainable = [n for n in range(trained[-1] + 1 if trained else 0) if n not in model.dropped]
        assert trained == sorted(trained) == trainable
        assert ledger.next - ledger.num_dropped == P * (version + 1 + S) and ledger.num_dropped == len(model.dropped)
        assert all(ledger.oldest(number) <= drawn_at[number] for number in ledger.leased)
    assert version > 2
    return num_alone, len(model.dropped)


def test_random_events():
    suspects, dropped = zip(*map(random_events, range(40)), strict=True)
    assert sum(suspects) > 200 and sum(dropped) > 10  # so every rule was met
