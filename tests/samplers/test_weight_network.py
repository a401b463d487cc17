"""Weights over the network: the same bytes, nothing left behind, and nobody gets them or replaces them unasked."""

import os
import threading
import time

import launch
import pytest
import torch
import torch.distributed as dist

from extras.samplers import weight_network
from extras.samplers.inbox import Inbox
from extras.samplers.weight_files import WeightWriter
from extras.samplers.weight_network import Outbox, Receiving

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)


def weights(version):
    for i, dtype in enumerate(DTYPES):
        yield f"odd.{i}", torch.arange(version, version + 7 * 13).remainder(3).view(7, 13).t().to(dtype)
    yield "empty", torch.empty(0, 4)
    yield "scalar", torch.tensor(float(version))
    yield "large", torch.full((37, 101), float(version))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_network, "CHUNK", 1000)
    writer, outbox = WeightWriter(None, tmp_path), Outbox("gloo", "tcp://127.0.0.1:5555", CPU, 60.0)
    yield writer, outbox
    writer.close()


def receive(about):
    one = Receiving(about, "127.0.0.1")
    one.start()
    one.join()
    return one


def assert_is_version(one, version):
    for (name, x), (expected, y) in zip(one.named_tensors(), weights(version), strict=True):
        assert name == expected and x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x.view(torch.uint8) if x.ndim else x, y.contiguous().view(torch.uint8) if y.ndim else y)


def test_weights_arrive_as_they_are_and_newer_ones_are_told_afterwards(run):
    writer, outbox = run
    before = launch.listens(os.getpid())
    told = outbox.offer("one", writer.write(1, weights(1)))
    assert launch.listens(os.getpid()) - before <= {"0100007F"}  # of this machine only
    newer = writer.write(2, weights(2))
    assert outbox.offer("one", newer) == told  # the transfer has begun
    late = outbox.offer("late", newer)
    assert_is_version(receive(told), 1)
    outbox.sending["one"].join()
    second = outbox.offer("one", newer)
    assert second["version"] == 2 and second["key"] != told["key"]
    assert_is_version(receive(second), 2)
    outbox.sending["one"].join()
    assert outbox.offer("one", newer) == second  # it has them, and has not said so
    assert_is_version(receive(late), 2)


def test_nothing_is_left_of_fifty_transfers(run):
    writer, outbox = run

    def transfer(version):
        assert_is_version(receive(outbox.offer("one", writer.write(version, weights(version)))), version)
        outbox.sending["one"].join()

    def left():
        return threading.active_count(), *(len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))

    transfer(1)
    before = left()
    for version in range(2, 52):
        transfer(version)
    deadline = time.monotonic() + 60
    while any(x > y for x, y in zip(left(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(x <= y for x, y in zip(left(), before, strict=True)), (before, left())


def test_who_does_not_know_the_key_gets_nothing_and_can_replace_nothing(run):
    writer, outbox = run
    told = outbox.offer("one", writer.write(1, weights(1)))
    stranger = receive(told | {"key": bytes(64), "patience_s": 2.0})
    outbox.sending["one"].join()
    assert "PermissionError" in outbox.sending["one"].error
    with pytest.raises(ConnectionError, match="gloo, 127.0.0.1"):
        stranger.named_tensors()
    outbox.terms["patience_s"] = 1.0
    told = outbox.offer("one", writer.write(2, weights(2)))
    deceived = receive(told | {"mark": bytes(64)})
    with pytest.raises(ConnectionError, match="not from the run"):
        deceived.named_tensors()
    outbox.sending["one"].join()
    assert outbox.sending["one"].error is not None


def test_a_side_that_never_comes_costs_the_time_out(run):
    writer, outbox = run
    outbox.terms["patience_s"] = 0.5
    told = outbox.offer("one", writer.write(1, weights(1)))
    outbox.sending["one"].join(60)
    assert "DistStoreError" in outbox.sending["one"].error and outbox.sending["one"].memory is None
    with pytest.raises(ConnectionError):
        receive(told).named_tensors()
    outbox.terms["patience_s"] = 60.0
    again = outbox.offer("one", writer.write(2, weights(2)))
    assert_is_version(receive(again), 2)


def test_a_sampler_goes_on_until_weights_have_come_and_tries_a_transfer_once(run, monkeypatch):
    writer, outbox = run
    told, gate, transfer = outbox.offer("one", writer.write(1, weights(1))), threading.Event(), Receiving.transfer
    monkeypatch.setattr(Receiving, "transfer", lambda receiving: gate.wait() and transfer(receiving))
    one = Inbox("127.0.0.1")
    assert one.take() is None  # nothing was told
    one.tell(told)
    assert one.take() is None and one.take() is None
    gate.set()
    one.arriving.join()
    version, tensors = one.take()
    assert version == 1 and [name for name, _ in tensors] == [name for name, _ in weights(1)]
    one.tell(told)  # the run does not know yet that the weights have come
    assert one.arriving is None and one.take() is None and one.arriving is None


def test_flags_that_do_not_fit_name_themselves():
    with pytest.raises(ValueError, match="--weights-transfer nccl: this machine has no GPU; give gloo"):
        Outbox("nccl", "tcp://127.0.0.1:5555", CPU, 10.0)
    with pytest.raises(
        ValueError, match="--weights-transfer gloo: --sampler-address ipc:///tmp/x must begin with tcp://"
    ):
        Outbox("gloo", "ipc:///tmp/x", CPU, 10.0)
    assert dist.is_gloo_available()
