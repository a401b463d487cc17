"""The thread that talks to samplers: its lock is free while it reads images, and each sampler gets an image once."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import helpers_vision as vision
import launch
import msgspec
import numpy as np
import pytest
import torch
import zmq
from helpers_data import versions_of
from PIL import Image

from extras import images
from extras.agents import EnvironmentFlags
from extras.samplers import SamplerFlags, Work, dispatcher, protocol
from extras.samplers.dispatcher import Dispatcher
from extras.samplers.prompts import Prompts
from rl.data.types import Sample, Sampling
from rl.sampling.engines.flags import EngineFlags

WAY = Sampling(n=1, max_tokens=3)


@pytest.fixture(autouse=True)
def own_images():
    vision.forget()
    yield
    vision.forget()


def rows_with_images(folder):
    """Two rows with an image each, and the files of these images."""
    files = [folder / f"{i}.png" for i in range(2)]
    for i, file in enumerate(files):
        Image.new("RGB", (28 + i, 28)).save(file)
    return [
        images.read({"images": [str(file)]}, "here", folder) | {"prompt_ids": np.int32([i + 1]), "row_index": i}
        for i, file in enumerate(files)
    ], files


class Client:
    """A sampler that says what a test wants it to."""

    def __init__(self, address, token):
        self.socket = protocol.connect(address, token, zmq.Context.instance())
        self.socket.linger = 0

    def say(self, message):
        """Send a message."""
        self.socket.send(msgspec.msgpack.encode(message))

    def hear(self, seconds=60):
        """The next message."""
        assert self.socket.poll(1000 * seconds), "no answer"
        return msgspec.msgpack.decode(self.socket.recv(), type=protocol.ToSampler)

    def leases(self):
        """Those of the next message that has some, by number."""
        leases = launch.until(lambda: self.hear().leases)
        return {lease.number: lease for lease in leases}


def opened_to_write(pipe: Path):
    """The file of a pipe that somebody reads, or None while nobody does."""
    try:
        return open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb")
    except OSError:
        return None


def group_of(number, row):
    """The response to a row, which version 0 has sampled."""
    columns = versions_of(row["prompt_ids"], (0, 1))
    sample = Sample(row["prompt_ids"], np.int32([7]), np.int8([1]), np.float32([-1]), "stop", 0, columns=columns)
    return protocol.Group(number, [protocol.pack(sample)])


def test_the_lock_is_free_while_a_disk_is_slow_and_an_image_is_read_once_for_a_sampler(tmp_path, monkeypatch):
    rows, (file, other) = rows_with_images(tmp_path)
    content = file.read_bytes()
    file.unlink()
    os.mkfifo(file)  # reading it takes until somebody writes
    setup = protocol.Setup("model", {}, EngineFlags(), EnvironmentFlags(), 9, [], [], WAY, 0, None, "float32")
    work = Work(None, rows, WAY, EngineFlags(), EnvironmentFlags(), batch_size=2, total_steps=9, longest=9, seed=0)
    prompts, ranks, groups = Prompts(work, 1, 10), SimpleNamespace(device=torch.device("cpu")), []
    one = Dispatcher(SamplerFlags(samplers=0), setup, prompts, lambda *group: groups.append(group), ranks)
    prompts.ledger.draw(0)  # the numbers 0 to 3, which are each row twice
    one.weights = {"version": 0}
    one.thread.start()
    client = Client(one.address, one.token)
    client.say(protocol.Join("client:1"))
    report = protocol.Report("client:1", client.hear().run, 0, 2, [], [], [], None, 0.0, 0.0)

    client.say(report)
    pipe = launch.until(lambda: opened_to_write(file))
    assert one.lock.acquire(timeout=5), "the lock is held while a file is read"
    monkeypatch.setattr(dispatcher, "SILENT_S", 0.1)
    time.sleep(0.3)
    assert [x.name for x in one.heard().values()] == ["client:1"]  # nobody listens, so it cannot be heard
    monkeypatch.undo()
    one.lock.release()
    with pipe:
        pipe.write(content)
    leases = client.leases()
    assert {number: lease.images for number, lease in leases.items()} == {
        number: {row["images"][0]: {0: content, 1: other.read_bytes()}[row["row_index"]]}
        for number, row in enumerate(map(prompts.row, range(2)))
    }

    # Once it has said that it knows them, the images do not come again. Nobody would write to the pipe.
    report = msgspec.structs.replace(report, holding=[0, 1], begun=[0, 1])
    client.say(report)
    done = [group_of(number, prompts.row(number)) for number in (0, 1)]
    client.say(msgspec.structs.replace(report, groups=done))
    client.say(msgspec.structs.replace(report, holding=[]))
    assert {number: lease.images for number, lease in client.leases().items()} == {2: {}, 3: {}}
    assert sorted(prompts.row(number)["row_index"] for number in (2, 3)) == [0, 1] and len(groups) == 2
    one.close()
    assert one.failure is None
