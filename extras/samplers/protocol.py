"""What a run and its samplers say to each other, and how a sampler shows that it belongs to the run.

A sampler says `Join` until it gets the `Setup`, builds its engine, and then says `Report` at least every second. The
run answers every report with `Orders`. Both say how things are, not what has changed. So a message that is lost, or
comes twice, is made good by the next one.

Messages are encrypted (CurveZMQ). The run's pair of keys follows from its token. The public one never travels, and
without it no connection comes about.
"""

import hashlib
import secrets
import socket as sockets
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from extras import agents, families
from rl.data.rows import Row
from rl.data.types import Sample, Sampling, unknown
from rl.sampling.engines.flags import EngineFlags

TOKEN = "GLASSRL_SAMPLER_TOKEN"  # a variable of the environment: everybody can read a command line
PARENT = "GLASSRL_SAMPLER_PARENT"  # the same: id of the process that has started this one and takes it with it
PROTOCOL = 10  # of these messages. Both sides must have the same.
LARGEST = 2**30  # bytes of a message. The run closes a connection that sends more.
MAX_LOGPROB = 1e-3  # rounding may take the log-prob of a certain token above 0

Name = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,300}\Z")]
Size = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Span = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Join(msgspec.Struct, tag=True):
    """A sampler asks for work. `name`: host and process id."""

    name: Name
    protocol: int = PROTOCOL


class OfImages(msgspec.Struct):
    """What a sampler has to know of the images of a run before it makes its engine."""

    count: int  # images of the run's data, and one more
    most_in_row: int
    of_probes: dict[int, bytes]  # what the files of the probes' images hold, by number


class Setup(msgspec.Struct, tag=True):
    """What a sampler needs to know of a run."""

    model: str
    template: dict[str, Any]  # fields of a Rendering: how the chat template is used
    rollout: EngineFlags
    environment: agents.EnvironmentFlags
    longest: int  # tokens of a prompt and its response
    stop_token_ids: list[int]
    probes: list[dict[str, Any]]  # rows that it samples a few tokens for after every push of weights
    probe_sampling: Sampling
    seed: int
    images: OfImages | None  # None: the data has none
    dtype: str  # in which the engine computes
    # Of this process of the run. Samplers of an earlier one have other weights under the same version.
    run: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))


class Lease(msgspec.Struct):
    """A prompt that a sampler is to answer. `number`: its place among the run's prompts, below 0 a held-out one."""

    number: int
    row: str  # as JSON: msgpack has no integers of more than 64 bits, and no text with a lone surrogate
    sampling: Sampling
    seed: int
    version: int  # weights must be at least this new
    images: dict[int, bytes] = {}  # what the files of those images hold that the sampler does not have, by number


class PackedSample(msgspec.Struct, array_like=True):
    """A sample without its prompt."""

    ids: bytes  # int32
    mask: bytes  # int8
    logprobs: bytes  # float32
    versions: bytes  # int32
    experts: bytes  # of each token of prompt and response in each layer, or none: see `rl.data.types.Columns`
    finish_reason: Literal["stop", "length", "error", "abort"]
    outcome: str | None  # of a conversation, as JSON too
    rows: "list[PackedSample]" = []  # of an agent's response, which has no tokens of its own, see `Sample.rows`


class Group(msgspec.Struct):
    """The responses to the prompt of a lease."""

    number: int
    samples: list[PackedSample]


class Probe(msgspec.Struct):
    """A few tokens that weights of a version have sampled, right after they were loaded."""

    version: int
    samples: list[PackedSample]


class Report(msgspec.Struct, tag=True):
    """How a sampler is. Groups are sent until the run says that it has them."""

    name: Name
    run: str  # of its Setup
    version: int  # of its weights. -1 means that it has none yet.
    room: Size  # responses that it can sample at a time
    holding: list[int]  # leases that it knows, also those that are finished
    begun: list[int]  # those of them that it samples, or would sample now if the run let it
    groups: list[Group]
    probe: Probe | None  # of these weights. None if it was sent a short time ago, or if it has no weights yet.
    busy_s: Span  # seconds since it is ready in which it has sampled, or waited for environments
    total_s: Span  # seconds since it is ready
    problem: str = ""  # why it ends now
    was_asked: bool = False  # to end, so that no prompt is the reason


class Orders(msgspec.Struct, tag=True):
    """What a sampler is to do."""

    leases: list[Lease]  # new ones, to be confirmed as `Report.begun`
    begin: list[int]  # those that it has confirmed. It begins no others.
    forget: list[int]  # leases to give up, or whose group the run has
    weights: dict[str, Any] | None  # the newest, see weight_files.py


class End(msgspec.Struct, tag=True):
    """The run has ended, or does not take this sampler."""

    reason: str


ToRun = Join | Report
ToSampler = Setup | Orders | End


def name_of(pid: int) -> str:
    """How a sampler of this machine is called."""
    return f"{sockets.gethostname()}:{pid}"


def pack(sample: Sample, *, learns: bool = True) -> PackedSample:
    """A sample as it travels. Args: learns, whether it is trained on. If not, nobody asks for its experts."""
    experts = sample.columns.get("routed_experts") if learns else None
    return PackedSample(
        ids=sample.response_ids.tobytes(),
        mask=sample.response_mask.tobytes(),
        logprobs=sample.rollout_logprobs.tobytes(),
        finish_reason=sample.finish_reason,
        versions=sample.columns["versions"][len(sample.prompt_ids) :].tobytes(),
        experts=b"" if experts is None else experts.tobytes(),
        outcome=None if sample.outcome is None else agents.outcome_to_json(sample.outcome),
        rows=[pack(row, learns=learns) for row in sample.rows],
    )


def unpack(packed: PackedSample, row: Row, sampling: Sampling, vocabulary: int, versions: range) -> Sample:
    """The sample that was packed, without its experts. Raises ValueError if it cannot be what an engine has sampled for
    the row.

    Args: sampling, as it was asked for; vocabulary, how many tokens the model knows; versions, of weights that may have
    sampled it.
    """
    ids, mask = np.frombuffer(packed.ids, np.int32), np.frombuffer(packed.mask, np.int8)
    logprobs, of_response = np.frombuffer(packed.logprobs, np.float32), np.frombuffer(packed.versions, np.int32)
    if not len(ids) == len(mask) == len(logprobs) == len(of_response):
        raise ValueError(
            f"a response has {len(ids)} tokens, {len(mask)} mask entries, {len(logprobs)} log-probs and "
            f"{len(of_response)} versions"
        )
    is_sampled = of_response < unknown(of_response)
    rules = {
        f"more tokens than {sampling.max_tokens}": len(ids) <= sampling.max_tokens,
        f"tokens beyond the vocabulary of {vocabulary}": ((ids >= 0) & (ids < vocabulary)).all(),
        "a mask of other numbers than 0 and 1": ((mask == 0) | (mask == 1)).all(),
        "log-probs that are not finite, or above 0": (np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)).all(),
        "log-probs of tokens that were not sampled": not logprobs[mask == 0].any(),
        f"tokens of other weights than those of {versions}": np.isin(of_response[is_sampled], versions).all(),
        "a mask that does not fit its versions": (is_sampled == (mask == 1)).all(),
        "rows beside tokens of its own, or in rows": not (packed.rows and len(ids))
        and not any(x.rows for x in packed.rows),
    }
    if wrong := [rule for rule, holds in rules.items() if not holds]:
        raise ValueError(f"a response has {' and '.join(wrong)}")
    of_row = {"prompt_ids": [], "row_index": row["row_index"]}
    of_prompt = np.full(len(row["prompt_ids"]), unknown(of_response), np.int32)
    return Sample(
        prompt_ids=row["prompt_ids"],
        response_ids=ids,
        response_mask=mask,
        rollout_logprobs=logprobs,
        finish_reason=packed.finish_reason,
        row_index=row["row_index"],
        columns={"versions": np.concatenate([of_prompt, of_response])},
        outcome=None if packed.outcome is None else agents.outcome_from_json(packed.outcome),
        rows=tuple(unpack(x, of_row, sampling, vocabulary, versions) for x in packed.rows),
    )


def with_experts(sample: Sample, experts: bytes, of_model: tuple[int, int, int] | None) -> Sample:
    """The sample with the experts that were packed, if there are any. Raises ValueError if they cannot be right. Args:
    of_model, see `families.shape_of`, or None if nobody has asked for experts.
    """
    if not experts:
        return sample
    layers, each, count = of_model or (0, 0, 0)
    none = families.unknown_expert(count)
    chosen = np.frombuffer(experts, none.dtype)
    if len(chosen) != sample.num_tokens * layers * each:
        raise ValueError(f"a response has {len(chosen)} numbers of experts for {sample.num_tokens} tokens")
    if not ((chosen >= 0) & (chosen < count) | (chosen == none)).all():
        raise ValueError(f"a response has experts beyond the {count} of the model")
    shaped = chosen.reshape(sample.num_tokens, layers, each)
    return replace(sample, columns={**sample.columns, "routed_experts": shaped})


def row_of(row: Row, *, whole: bool) -> dict[str, Any]:
    """What a sampler has to know of a row: all of it, if environments or agents take part."""
    return row if whole else {name: row[name] for name in ("prompt_ids", "row_index")}


def listen(address: str, token: str, context: zmq.Context) -> tuple[zmq.Socket, str]:
    """A socket for samplers that know the token, and its address. Raises ValueError, naming --sampler-address, if
    nothing can listen there.
    """
    socket = _lossless(context.socket(zmq.ROUTER))
    socket.maxmsgsize = LARGEST
    socket.curve_server, (socket.curve_secretkey, socket.curve_publickey) = True, _keys(token)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(
            f"--sampler-address {address}: {error}; give tcp://127.0.0.1:* for any port, or such as tcp://0.0.0.0:5555"
        ) from error
    return socket, socket.last_endpoint.rstrip(b"\0").decode()


def connect(address: str, token: str, context: zmq.Context) -> zmq.Socket:
    """A sampler's socket to a run. Raises ValueError if the address is none."""
    socket = _lossless(context.socket(zmq.DEALER))
    _, socket.curve_serverkey = _keys(token)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.identity = secrets.token_bytes(8)
    socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 1000  # ms
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ValueError(f"--connect {address}: {error}; give such as tcp://127.0.0.1:5555") from error
    return socket


def _keys(token: str) -> tuple[bytes, bytes]:
    """The run's private and public key."""
    private = z85.encode(hashlib.sha256(token.encode()).digest())
    return private, zmq.curve_public(private)


def _lossless(socket: zmq.Socket) -> zmq.Socket:
    """ZeroMQ drops messages to a peer that has a thousand unread ones, and waits for unread ones at the end."""
    socket.sndhwm = socket.rcvhwm = socket.linger = 0
    return socket
