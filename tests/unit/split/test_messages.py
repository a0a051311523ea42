"""Headers and payloads of split execution: what is sent arrives, and what is wrong is told apart from what is
no message."""

import random
import secrets
import socket
import struct
import threading
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.errors import AdapterMismatch, ConfigError, RequestError
from coserve.split.messages import (
    MOST_HEADER,
    VERSION,
    BaseHello,
    ClientHello,
    GroupShape,
    GroupTable,
    Limits,
    LinearAnswer,
    LinearCall,
    decode_to_client,
    decode_to_executor,
    encode_header,
)
from coserve.wire.frames import FrameReader, send_with_payload
from coserve.wire.messages import Fault

LIMITS = Limits(rows=16, payload=4096)
HELLO = BaseHello(
    VERSION,
    "abc",
    "float32",
    (GroupShape(8, {"l.q": 8, "l.k": 4}), GroupShape(8, {"l.o": 6}), GroupShape(2, {"l.wide": 2000})),
    LIMITS,
)
CALL = LinearCall(7, ("l.q", "l.k"), "forward", 3, "float32", "training", 3 * 8 * 4, 0.5)


def changed(**fields: Any) -> LinearCall:
    return msgspec.structs.replace(CALL, **fields)


@pytest.mark.parametrize("message", [CALL, changed(deadline=None), ClientHello(VERSION, "me", "abc", "key")])
def test_what_a_client_says_arrives(message: Any) -> None:
    assert decode_to_executor(encode_header(message), LIMITS) == message


@pytest.mark.parametrize(
    "message", [HELLO, LinearAnswer(7, 144), LinearAnswer(7, 0, Fault("RequestError", "no")), Fault("X", "y")]
)
def test_what_an_executor_says_arrives(message: Any) -> None:
    assert decode_to_client(encode_header(message), LIMITS) == message


def test_bytes_of_calls_and_answers_both_ways() -> None:
    table = GroupTable(HELLO)
    assert table.check_call(CALL) == ([8], 3 * 12 * 4)
    back = changed(direction="backward", nbytes=3 * 12 * 4)
    assert table.check_call(back) == ([8, 4], 3 * 8 * 4)
    table.check_call(changed(paths=("l.k",), direction="backward", nbytes=3 * 4 * 4))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"paths": ("l.q", "l.v")}, "'l.v' is no linear"),
        ({"paths": ("l.v",)}, "'l.v' is no linear"),
        ({"paths": ("l.q", "l.o")}, "different inputs"),
        ({"paths": ("l.q", "l.q")}, "twice"),
        ({"dtype": "bfloat16"}, "the base is float32"),
        ({"rows": 17}, "at most 16"),
        ({"rows": 4}, "96 bytes came for 4 rows, which have 128"),
        ({"direction": "backward"}, "which have 144"),
        ({"paths": ("l.wide",), "nbytes": 24}, "the answer would have 24000 bytes"),
    ],
)
def test_a_wrong_call_is_refused_and_no_more(fields: dict[str, Any], text: str) -> None:
    call = decode_to_executor(encode_header(changed(**fields)), LIMITS)
    assert isinstance(call, LinearCall)
    with pytest.raises(RequestError, match=text):
        GroupTable(HELLO).check_call(call)


def test_other_versions_and_other_bases() -> None:
    table = GroupTable(HELLO)
    for fingerprint in ("", "abc"):
        table.check_hello(ClientHello(VERSION, "me", fingerprint))
    with pytest.raises(ConfigError, match="version 0 of the protocol, the executor 7"):
        table.check_hello(ClientHello(0, "me"))
    with pytest.raises(AdapterMismatch, match="the client's base is abd"):
        table.check_hello(ClientHello(VERSION, "me", "abd"))


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": 0},
        {"rows": -1},
        {"rows": 1 << 40},
        {"nbytes": -1},
        {"nbytes": LIMITS.payload + 1},
        {"number": -1},
        {"paths": ()},
        {"paths": ("x",) * 65},
        {"paths": ("x" * 513,)},
        {"direction": "sideways"},
        {"dtype": "int8"},
        {"work": "play"},
        {"deadline": float("nan")},
        {"deadline": -1.0},
    ],
)
def test_a_header_out_of_range_ends_the_connection(fields: dict[str, Any]) -> None:
    with pytest.raises(ConnectionError):
        decode_to_executor(encode_header(changed(**fields)), LIMITS)


def test_either_end_decodes_the_others_messages_only() -> None:
    with pytest.raises(ConnectionError):
        decode_to_executor(encode_header(HELLO), LIMITS)
    with pytest.raises(ConnectionError):
        decode_to_client(encode_header(CALL), LIMITS)
    with pytest.raises(ConnectionError, match="payload"):
        decode_to_client(encode_header(LinearAnswer(1, LIMITS.payload + 1)), LIMITS)
    with pytest.raises(ConnectionError, match="header of"):
        decode_to_executor(b"\x90" * (MOST_HEADER + 1), LIMITS)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.integers(1, 2000).map(lambda depth: b"\x91" * depth),  # nested lists
        st.tuples(st.integers(0, 10**6), st.integers(0, 255)).map(
            lambda at: _with_byte(encode_header(CALL), *at)
        ),
        st.dictionaries(
            st.sampled_from(["type", *CALL.__struct_fields__]),
            st.one_of(
                st.none(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.just("LinearCall")
            ),
        ).map(msgspec.msgpack.encode),
    )
)
def test_hostile_headers_are_a_connection_error_or_checked(data: bytes) -> None:
    """Nothing else is raised, and what passes both checks is within all limits."""
    try:
        message = decode_to_executor(data, LIMITS)
    except ConnectionError:
        return
    if isinstance(message, LinearCall):
        assert message.nbytes <= LIMITS.payload
        try:
            GroupTable(HELLO).check_call(message)
        except RequestError:
            return
        assert message.rows <= LIMITS.rows and set(message.paths) <= {"l.q", "l.k", "l.o", "l.wide"}


def test_payloads_of_any_size_pass_uncopied_between_messages() -> None:
    """More than a socket's buffer holds, in several pieces, and messages after it are in step."""
    seed = secrets.randbits(32)
    draws = random.Random(seed)
    ours, theirs = socket.socketpair()
    sent = [
        [draws.randbytes(draws.choice([0, 1, 100, 70_000, 1 << 20])) for _ in range(draws.randrange(5))]
        for _ in range(20)
    ]

    def send() -> None:
        for number, pieces in enumerate(sent):
            nbytes = sum(map(len, pieces))
            send_with_payload(
                ours, encode_header(LinearAnswer(number, nbytes)), [memoryview(piece) for piece in pieces]
            )
        ours.close()

    thread = threading.Thread(target=send, daemon=True)  # a reader that fails leaves it waiting for room
    thread.start()
    reader = FrameReader(theirs, patience=5.0, most=MOST_HEADER)
    for number, pieces in enumerate(sent):
        header = reader.read()
        assert header is not None
        answer = decode_to_client(header, Limits(payload=1 << 30))
        assert isinstance(answer, LinearAnswer) and answer.number == number, f"seed {seed}"
        into = bytearray(answer.nbytes)
        reader.read_payload(memoryview(into))
        assert into == b"".join(pieces), f"seed {seed}"
    assert reader.read() is None
    thread.join()


class _Dribbling:
    """A socket that takes seven bytes at a time, as one that a signal interrupts takes a part."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def sendmsg(self, buffers: list[memoryview]) -> int:
        part = b"".join(buffers)[:7]
        self.taken += part
        assert len(self.taken) < 200, "bytes are sent again"
        return len(part)


def test_what_a_socket_takes_in_part_is_sent_on() -> None:
    sock = _Dribbling()
    pieces = [b"a" * 10, b"", b"bc", b"d" * 30]
    send_with_payload(cast(socket.socket, sock), b"head", [memoryview(piece) for piece in pieces])
    assert sock.taken == struct.pack(">I", 4) + b"head" + b"".join(pieces)


def test_a_payload_that_ends_early_or_does_not_come_is_told() -> None:
    ours, theirs = socket.socketpair()
    send_with_payload(ours, b"h", [memoryview(b"abc")])
    reader = FrameReader(theirs, patience=0.05)
    assert reader.read() == b"h"
    with pytest.raises(TimeoutError, match="payload"):
        reader.read_payload(memoryview(bytearray(4)))
    ours, theirs = socket.socketpair()
    send_with_payload(ours, b"h", [memoryview(b"abc")])
    ours.close()
    reader = FrameReader(theirs)
    assert reader.read() == b"h"
    with pytest.raises(ConnectionError, match="within a payload"):
        reader.read_payload(memoryview(bytearray(4)))


def test_a_reader_takes_no_longer_message_than_it_is_told() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(struct.pack(">I", 101))
    with pytest.raises(ConnectionError, match="longer than any"):
        FrameReader(theirs, most=100).read()


def _with_byte(data: bytes, place: int, value: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([value]) + data[place + 1 :]
