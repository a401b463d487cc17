"""The connection of a sampler to its run."""

import time
import urllib.parse

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from extras.samplers import protocol

GONE_S = 5.0  # the run's process has ended if its connection was lost for this long
SILENT_S = 600.0  # nor is there a run if it says nothing for this long, since its machine may have lost power
REFUSALS = 3  # connections that end before a word is said


class Gone(Exception):
    """There is no run any more, or it wants no sampler. The text says which."""


class Connection:
    """The connection of a sampler of this name to the run. Raises Gone once the run has ended or has said nothing for
    too long, at first for `patience_s`, or ValueError if it refuses the token.
    """

    def __init__(self, address: str, token: str, name: str, patience_s: float):
        self.name = name
        self.host = urllib.parse.urlparse(address).hostname
        self.context = zmq.Context()
        self.socket = protocol.connect(address, token, self.context)
        self.events = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self.patience_s, self.heard_at = patience_s, time.monotonic()
        self.lost_at: float | None = None  # since when there is no connection. None means there is one.
        self.is_known, self.refusals = False, 0  # whether the run ever spoke, and connections that it ended before
        self.reader, self.writer = msgspec.msgpack.Decoder(protocol.ToSampler), msgspec.msgpack.Encoder()

    def send(self, message: protocol.Join | protocol.Report) -> None:
        """Send a message, at once or when there is a connection. Raises RuntimeError if the run would not take it."""
        if len(encoded := self.writer.encode(message)) > protocol.LARGEST:
            raise RuntimeError(f"a group has {len(encoded)} bytes, above {protocol.LARGEST}: lower --rollout-n")
        self.socket.send(encoded)

    def leave(self, report: protocol.Report) -> None:
        """Tell the run why this sampler ends."""
        self.send(report)
        self.context.destroy(linger=2000)

    def receive(self, wait_s: float) -> list[protocol.Setup | protocol.Orders]:
        """What has come, waiting this long for the first message."""
        messages = []
        while self.socket.poll(0 if messages else 1000 * wait_s):
            message = self.reader.decode(self.socket.recv())
            self.heard_at, self.is_known = time.monotonic(), True
            if isinstance(message, protocol.End):
                raise Gone(message.reason)
            messages.append(message)
        while self.events.poll(0):
            self._note(recv_monitor_message(self.events)["event"])
        now = time.monotonic()
        if self.is_known and self.lost_at is not None and now - self.lost_at > GONE_S:
            raise Gone("the run has ended, or its machine cannot be reached")
        if now - self.heard_at > (SILENT_S if self.is_known else self.patience_s):
            raise Gone(f"the run has said nothing for {now - self.heard_at:.0f} s")
        return messages

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.lost_at, self.refusals = None, 0
        elif event == zmq.EVENT_DISCONNECTED:
            self.lost_at = self.lost_at or time.monotonic()
            self.refusals += 1
            if not self.is_known and self.refusals == REFUSALS:
                raise ValueError("the run refuses this sampler: --token is that of another run")

    def join(self) -> protocol.Setup:
        """Ask for work until the run answers."""
        while True:
            self.send(protocol.Join(self.name))
            for message in self.receive(wait_s=2.0):
                if isinstance(message, protocol.Setup):
                    return message
