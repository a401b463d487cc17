"""Seconds and tokens per second of a step, and the alarms that metrics raise."""

import math
import time

import pytest
from helpers_data import ranks_without_group

from rl.run.alarms import alarms, parse_alarm
from rl.run.clock import Clock

NAN, INF = math.nan, math.inf


def test_clock_adds_up_phases_of_the_same_name(world):
    clock = Clock(world)
    time.sleep(0.02)
    clock("gen")
    time.sleep(0.05)
    clock("update")
    time.sleep(0.03)
    clock("gen")
    metrics = clock.metrics(num_tokens=34)
    assert metrics.keys() == {"timing_s/gen", "timing_s/update", "timing_s/step", "perf/throughput"}
    assert metrics["timing_s/gen"] >= 0.05 and metrics["timing_s/update"] >= 0.05
    phases = metrics["timing_s/gen"] + metrics["timing_s/update"]
    assert phases <= metrics["timing_s/step"] < phases + 5
    del clock.seconds["gen"]  # a copied script may have no phase of this name
    assert not {name for name in clock.metrics(num_tokens=34, num_generated=20) if "gen" in name}


def test_throughput_counts_tokens_per_second_and_rank(monkeypatch):
    clock = Clock(ranks_without_group(0, 4))
    clock.seconds = {"gen": 0.5}
    monkeypatch.setattr(clock, "_now", lambda: clock.start + 2.0)
    expected = {
        "timing_s/gen": 0.5,
        "timing_s/step": 2.0,
        "perf/total_num_tokens": 34.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 34 / (2.0 * 4),
        "perf/gen_tokens_per_s": 20 / 0.5,
    }
    assert clock.metrics(num_tokens=34, num_generated=20) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("response_length/clip_ratio>0.5", ("response_length/clip_ratio", ">", 0.5)),
        ("val-core/my data/reward/mean@1 < -1e-3 ", ("val-core/my data/reward/mean@1", "<", -0.001)),
        (" a>3", ("a", ">", 3.0)),
    ],
)
def test_parse_alarm(text, expected):
    assert parse_alarm(text) == expected


@pytest.mark.parametrize("text", ["", "a", "a>", ">1", " >1", "a>=1", "a>b", "a>1>2", "a<b<1", "a=1", "a>nan", "a<inf"])
def test_a_text_that_is_no_alarm_is_refused_with_the_form(text):
    with pytest.raises(ValueError) as error:
        parse_alarm(text)
    assert str(error.value).startswith(f"--alarms {text!r} must be metric>number or metric<number")
    with pytest.raises(ValueError, match="--alarms"):
        alarms({"a": 0.0}, [text])


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [
        (0.75, ["a is 0.75, beyond the limit of --alarms a>0.5"], []),
        (0.5, [], []),  # at the limit
        (0.25, [], ["a is 0.25, beyond the limit of --alarms a<0.5"]),
        (INF, ["a is inf, beyond the limit of --alarms a>0.5"], []),
        (-INF, [], ["a is -inf, beyond the limit of --alarms a<0.5"]),
        (NAN, ["a is nan, beyond the limit of --alarms a>0.5"], ["a is nan, beyond the limit of --alarms a<0.5"]),
    ],
)
def test_alarms(value, above, below):
    metrics = {"a": value, "b": NAN}  # nobody asked for b
    assert alarms(metrics, ["a>0.5"]) == above and alarms(metrics, ["a<0.5"]) == below
    assert alarms(metrics, ["a<0.5", "absent>0", "absent<0", "a > 0.5"]) == below + above
    assert alarms(metrics, []) == []
