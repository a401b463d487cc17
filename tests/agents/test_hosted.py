"""Conversations in a process of their own: what is given up ends, and so does the process."""

import os
import signal
import threading

import launch
import pytest
from helpers_engines import TEMPERATURE, push
from test_environments import STOPS, Made, rows_of, sample, tokenizer  # noqa: F401

from rl.data.types import Sampling
from rl.sampling.loop import Loop, Trajectory

WAY = Sampling(n=2, temperature=TEMPERATURE, max_tokens=200, stop_token_ids=STOPS)


@pytest.fixture
def made(tmp_path, tokenizer):  # noqa: F811
    made = Made(tmp_path, tokenizer)
    yield made
    made.partner.close()


def test_what_is_given_up_ends_there_and_its_answers_are_nobodys(hf_engine, policy, made, tokenizer):  # noqa: F811
    push(hf_engine, policy)
    loop = Loop(hf_engine, made.partner, seed=1)
    for row in rows_of(tokenizer, *[{"turns": 9, "latency": 0.3}] * 3):
        loop.start(row["row_index"], row, WAY)
    while loop.is_open() and not any(x.turns for x in loop.trajectories.values()):
        loop.step()
    assert len(launch.until(made.pids)) <= 6 and len(loop.trajectories) == 6
    loop.abandon()
    launch.until(lambda: not any(map(launch.alive, made.pids())), 60, "a process is left behind")
    again = sample(hf_engine, made, rows_of(tokenizer, {"turns": 1}))
    assert len(again) == 2 and all(x.finish_reason != "error" for x in again)
    launch.until(lambda: not any(map(launch.alive, made.pids())), 60, "a process is left behind")
    assert not (made.partner.open or made.partner.numbers)


def test_rows_and_answers_that_fill_the_connection_both_arrive(made, tokenizer):  # noqa: F811
    """2.4 MB on the way there while 2 MB come back."""
    partner, way = made.partner, Sampling(max_tokens=10**7, stop_token_ids=STOPS)
    about = [{"turns": 1, "does": "large", "more": "x" * 300_000}] * 8
    waiting = {Trajectory((i, 0), row, way, None) for i, row in enumerate(rows_of(tokenizer, *about))}
    for x in waiting:
        partner.begin(x, 0)
    ended = []
    for _ in range(1000):
        for x, ids in partner.answers(0.1):
            if ids is None:
                ended.append((x.finish_reason, partner.end(x).extra_info["messages"]))
                continue
            x.tell(ids)
            if x.turns == 0:
                x.tell([5, STOPS[1]])  # the policy says this
                x.turns, x.finish_reason = 1, "stop"
                assert partner.after(x)
            else:
                ended.append((len(ids), partner.end(x).extra_info["messages"]))
        if len(ended) == 8:
            break
    assert len(ended) == 8 and all(isinstance(n, int) and n >= 10**5 for n, _ in ended)


def test_the_death_of_the_process_is_an_error_that_says_so(hf_engine, policy, made, tokenizer):  # noqa: F811
    push(hf_engine, policy)
    os.kill(made.partner.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the process of the conversations has ended; it was killed by signal 9,"):
        sample(hf_engine, made, rows_of(tokenizer, {"turns": 1}))
    hf_engine.abort()
    with pytest.raises(RuntimeError, match="it was killed by signal 9,"):  # however often it is asked
        made.partner.answers(1.0)


def test_an_error_there_stops_the_run(made):
    made.partner.messages.append(("begin", 1))  # no message of ours: it lacks the row
    with pytest.raises(RuntimeError, match="the process of the conversations has ended; its error stands above"):
        made.partner.answers(30.0)


def test_it_ends_while_a_process_that_was_forked_later_holds_its_connection(made, tmp_path, tokenizer):  # noqa: F811
    (tmp_path / "later").mkdir()
    later = Made(tmp_path / "later", tokenizer)
    closing = threading.Thread(target=made.partner.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and not launch.alive(made.partner.pid)
    later.partner.close()
