"""The pump's C against the Python that it stands in for: it may be faster, and nothing else may differ."""

from __future__ import annotations

import errno
import gc
import os
import socket
import struct
import weakref
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_proxy.relay.pump import BUILT
from tests.relay.scripted import DONE, event, usage_event

if not BUILT:
    pytest.skip("the pump is not built here", allow_module_level=True)

from omni_proxy.api.sse import MARKS
from omni_proxy.relay import _pump
from tests.relay.pumped import FIRST, Line, chunk, definition

TOKENS = [event(text) for text in ("a", "längeres Stück 😀", "c" * 300, "")]
END = b"0\r\n\r\n"
MOST_REST = 16 << 10


def play(parts: list[bytes]) -> Line:
    """A stream with the pump, after checking that all is as without one."""
    reads, body = definition(parts)
    with Line() as line:
        for part in parts:
            line.say(part)
        if line.moved:
            assert line.take() == b""
        assert (line.body(), line.told()) == (body, reads.told())
    return line


# ------------------------------------------------------------------------------ what passes


def test_a_token_passes_as_it_came() -> None:
    with Line() as line:
        for token in TOKENS:
            line.say(chunk(token))
            assert (line.got.endswith(chunk(token)), line.moved) == (True, True)
        assert line.take() == b""
        assert line.sent == len(FIRST) + sum(map(len, TOKENS))
        assert line.lengths == [1.0] * len(TOKENS)


def test_many_chunks_in_one_read_pass_in_one_write() -> None:
    with Line() as line:
        line.say(b"".join(map(chunk, TOKENS * 20)))
        assert (line.body(), line.moved, line.lengths) == (FIRST + b"".join(TOKENS * 20), True, [1.0])


@pytest.mark.parametrize(
    "framed", [b"A\r\n: 345678\n\n\r\n", b"0000a\r\n: 345678\n\n\r\n", b"9\r\ndata: 8\n\n\r\n"], ids=repr
)
def test_ways_of_writing_a_size(framed: bytes) -> None:
    with Line() as line:
        line.say(framed)
        assert (line.got.endswith(framed), line.moved) == (True, True)


def test_what_is_quoted_or_null_passes() -> None:
    with Line() as line:
        for text in ('"error": {}', '"usage":{"a":1}', "say error, usage and recomputed", "[done]"):
            line.say(chunk(event(text)))
        line.say(chunk(b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n'))
        assert (line.moved, line.backs) == (True, [])


# -------------------------------------------------------------------------- what is Python's


@pytest.mark.parametrize(
    "special",
    [
        chunk(DONE),
        chunk(usage_event()),
        chunk(b'data: {"error":{"code":400}}\n\n'),
        chunk(b'data: {"choices":[{"stop_reason":"recomputed"}]}\n\n'),
        chunk(b"data: 1\r\n\r\n"),
        chunk(b"data: 1\n"),
        chunk(b"\n"),
        b"8;a=b\r\ndata: 1\n\r\n",
        b"8 \r\ndata: 1\n\r\n",
        b"00000008\r\n: 3456\n\n\r\n",
        END,
        b"x",
        b"\r\n",
        b"9\rdata: 1\n\n\r\n",
        b"9\r\ndata: 1\n\nX",
        b"9\r\ndata: 1\n\n\rX",
        b"fffffff\r\nd",
    ],
    ids=repr,
)
def test_what_is_not_plain_comes_back_whole(special: bytes) -> None:
    """... with all that was read with it, and nothing of that has gone out."""
    for before in (b"", chunk(TOKENS[0])):
        assert given_back(before + special) == [(b"", before + special, 0, 7.0)]


def given_back(data: bytes) -> list[tuple[bytes, bytes, int, float]]:
    """What comes back of one read; the client must get nothing."""
    backs: list[tuple[bytes, bytes, int, float]] = []
    with Line() as line:
        line.take()
        line.pump.add(line.src.fileno(), line.dst.fileno(), 7.0, lambda *back: backs.append(back))
        line.worker.sendall(data)
        line.serve()
        assert len(line.pump) == 0
        line.serve()
        line.read()
        assert line.body() == FIRST
    return backs


def test_every_mark_is_found_wherever_it_stands() -> None:
    for mark in MARKS:
        for length in (0, 1, 7, 300):
            for at in (0, length // 2, length):
                text = chunk(b"x" * at + mark + b"x" * (length - at) + b"\n\n")
                assert given_back(text) == [(b"", text, 0, 7.0)], text


def test_a_part_of_a_mark_is_none() -> None:
    with Line() as line:
        for mark in MARKS:
            line.say(chunk(mark[:-1] + b"\n\n"))
            line.say(chunk(mark[1:] + b"\n\n"))
        assert line.moved


def test_an_event_in_an_unfinished_chunk_is_not_kept_waiting() -> None:
    """A worker, or a proxy in front of it, that puts many events into one chunk."""
    two = TOKENS[0] + TOKENS[1]
    with Line() as line:
        line.say(b"%x\r\n%b" % (len(two), TOKENS[0]))
        assert (line.body(), line.moved) == (FIRST + TOKENS[0], False)
        line.say(TOKENS[1] + b"\r\n")
        assert (line.body(), line.moved) == (FIRST + two, True)


@pytest.mark.parametrize("text", [b"a\n\nb", b"a\r\n\r\nb", b"a\n\r\nb", b"a\r\rb"])
def test_every_end_of_an_event_is_one(text: bytes) -> None:
    with Line() as line:
        line.say(b"100\r\n" + text)
        assert (line.moved, line.got.endswith(text[:-1] + b"\r\n")) == (False, True)


def test_a_large_chunk_that_has_begun_is_pythons() -> None:
    with Line() as line:
        line.say(b"%x\r\n" % (MOST_REST + 10) + b"x" * (MOST_REST - 6))
        assert line.moved
        line.say(b"x")
        assert (line.moved, line.pump.take(0)) == (False, None)


# ------------------------------------------------------------------------------------- cuts


STREAM = b"".join(map(chunk, [*TOKENS, TOKENS[0] + TOKENS[1], usage_event(), DONE])) + END


def test_a_stream_cut_at_every_byte() -> None:
    for at in range(len(STREAM) + 1):
        play([STREAM[:at], STREAM[at:]] if 0 < at < len(STREAM) else [STREAM])


def test_a_stream_byte_by_byte() -> None:
    parts = [STREAM[at : at + 1] for at in range(len(STREAM))]
    reads, body = definition(parts)
    line = play(parts)
    assert (line.sent, reads.sent) == (len(body),) * 2


EVENTS = st.one_of(
    st.sampled_from(
        [*TOKENS, usage_event(), b": comment\n\n", b'data: {"error":{"code":400}}\n\n', b"data: 1\r\n\r\n"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(event),
    st.sampled_from(MARKS).map(lambda mark: b"data: {" + mark + b"\n\n"),
)
CHUNKS = (
    st.lists(EVENTS, min_size=1, max_size=3)
    .map(b"".join)
    .flatmap(lambda data: st.sampled_from([[data], [data[: len(data) // 2], data[len(data) // 2 :]]]))
)
STREAMS = st.lists(CHUNKS, max_size=8).map(
    lambda parts: b"".join(chunk(data) for part in parts for data in part if data)
)


@settings(max_examples=300, deadline=None)
@given(STREAMS, st.lists(st.integers(1, 3000), max_size=14), st.booleans())
@example(STREAM, [], True)
def test_however_a_stream_is_cut_all_is_as_without_a_pump(stream: bytes, cuts: list[int], ends: bool) -> None:
    if ends:
        stream += chunk(DONE) + END
    at = [0, *sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]
    parts = [stream[a:b] for a, b in pairwise(at) if a < b]
    reads, _ = definition(parts)
    line = play(parts)
    assert line.gaps + len(line.lengths) == reads.gaps
    assert line.sent == reads.sent


# --------------------------------------------------------------------- slow and lost clients


def test_a_client_that_does_not_read_gets_all_in_the_end() -> None:
    """A short write: what was not taken comes back, and Python holds it."""
    flood = chunk(event("x" * 5000))
    with Line(client_buffer=4096) as line:
        said = 0
        while line.moved:
            line.worker.sendall(flood)
            line.serve()
            said += 1
        ((unsent, rest, sent, _),) = line.backs
        assert (0 < len(unsent) <= len(flood), rest, sent) == (True, b"", said * len(event("x" * 5000)))
        line.read()
        assert line.body() == FIRST + event("x" * 5000) * said


def test_a_client_that_has_left() -> None:
    """Nothing kills the process, and all of it comes back for the transport to find out."""
    with Line() as line:
        line.client.close()
        line.worker.sendall(chunk(TOKENS[0]))
        line._go_on = lambda _data: None  # type: ignore[method-assign,assignment]
        line.serve()
        assert [back[:2] for back in line.backs] == [(chunk(TOKENS[0]), b"")]


# --------------------------------------------------------------------------- the worker's end


@pytest.mark.parametrize("begun", [b"", chunk(TOKENS[0])[:20]])
def test_the_end_of_the_connection_comes_back_with_what_was_begun(begun: bytes) -> None:
    with Line() as line:
        if begun:
            line.say(begun)
        line.worker.close()
        line._go_on = lambda _data: None  # type: ignore[method-assign,assignment]
        line.serve()
        assert [back[:2] for back in line.backs] == [(b"", begun)]
        assert line.src.recv(10) == b"", "the transport sees the end too"


def turn(pump: _pump.Pump) -> None:
    """One turn of the moving, and what comes of it."""
    pump.turn(1.0)
    pump.collect()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        return near, far


def test_a_reset_is_left_for_the_transport() -> None:
    """Reading an error takes it away: who waits for it would see a clean end."""
    src, worker = tcp_pair()
    dst, client = socket.socketpair()
    backs: list[tuple[bytes, bytes, int, float]] = []
    pump = _pump.Pump(MARKS)
    with src, dst, client, worker:
        pump.add(src.fileno(), dst.fileno(), 0.0, lambda *back: backs.append(back))
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        worker.close()
        turn(pump)
        assert backs == [(b"", b"", 0, 0.0)]
        with pytest.raises(ConnectionResetError):
            src.recv(10)
        pump.close()


# ------------------------------------------------------------------------------- in and out


def test_a_stream_that_was_taken_out_is_left_alone() -> None:
    with Line() as line:
        stream = line.stream
        assert stream is not None
        line.say(chunk(TOKENS[0]) + b"1")
        assert (line.take(), line.pump.take(stream), line.pump.last_sign(stream)) == (b"1", None, None)
        line.worker.sendall(chunk(TOKENS[0]))
        line.serve()
        assert line.src.recv(1 << 16, socket.MSG_DONTWAIT) == chunk(TOKENS[0])


def test_the_id_of_an_earlier_stream_is_not_that_of_a_later_one_in_its_place() -> None:
    with Line() as line:
        first = line.stream
        line.take()
        line.enter()
        assert first is not None
        assert (line.stream != first, line.pump.take(first), line.moved, len(line.pump)) == (True, None, True, 1)


@pytest.mark.parametrize("number", [1 << 40, (1 << 64) - 1, 5000])
def test_an_id_that_nobody_has(number: int) -> None:
    with Line() as line:
        assert (line.pump.take(number), line.pump.last_sign(number)) == (None, None)


@pytest.mark.parametrize("number", [-1, 1 << 64, "1", None])
def test_what_is_no_id(number: object) -> None:
    with Line() as line, pytest.raises((TypeError, OverflowError)):
        line.pump.take(number)  # type: ignore[arg-type]


def test_one_socket_is_read_for_one_stream() -> None:
    with Line() as line:
        with pytest.raises(OSError) as caught:
            line.pump.add(line.src.fileno(), line.dst.fileno(), 0.0, print)
        assert (caught.value.errno, len(line.pump)) == (errno.EEXIST, 1)
        line.say(chunk(TOKENS[0]))
        assert line.got.endswith(chunk(TOKENS[0]))


def test_a_socket_that_is_none() -> None:
    with Line() as line, pytest.raises(OSError):
        line.pump.add(1 << 20, line.dst.fileno(), 0.0, print)


def test_a_number_that_another_socket_has_by_now() -> None:
    """Whoever closes a socket has taken its stream out: what then comes under its number is for its owner."""
    with Line() as line:
        line.take()
        far, near = socket.socketpair()
        with far, near:
            os.dup2(near.fileno(), line.src.fileno())  # closes the one and gives its number to the other
            far.sendall(chunk(TOKENS[0]))
            line.serve()
            line.read()
            assert (line.body(), line.src.recv(1 << 16)) == (FIRST, chunk(TOKENS[0]))


def test_one_stream_that_ends_another_on_its_way_back() -> None:
    """Both come back; what is done with the first takes the second out, with what it came back with."""
    pump = _pump.Pump(MARKS)
    pairs = [socket.socketpair() for _ in range(2)]
    outs = [socket.socketpair() for _ in range(2)]
    ids: list[int] = []
    backs: list[int] = []

    def back(number: int) -> None:
        backs.append(number)
        assert pump.take(ids[1 - number]) == (b"", chunk(DONE), 0, 0.0)

    for number, ((_, src), (dst, _)) in enumerate(zip(pairs, outs, strict=True)):
        ids.append(pump.add(src.fileno(), dst.fileno(), 0.0, lambda *_, n=number: back(n)))  # type: ignore[misc]
    for worker, _ in pairs:
        worker.sendall(chunk(DONE))
    turn(pump)
    assert (len(backs), len(pump)) == (1, 0)
    pump.close()
    for sock in (s for pair in (*pairs, *outs) for s in pair):
        sock.close()


def test_all_of_many_ready_streams_are_served_in_turn() -> None:
    """More than one turn serves: who was not served is still ready, and nobody is served twice before all were once."""
    count = 200
    pump = _pump.Pump(MARKS)
    pairs = [socket.socketpair() for _ in range(count)]
    outs = [socket.socketpair() for _ in range(count)]
    flood = chunk(event("x" * 1000)) * 200
    for (worker, src), (dst, client) in zip(pairs, outs, strict=True):
        pump.add(src.fileno(), dst.fileno(), 0.0, lambda *_: None)
        worker.setblocking(False)
        client.setblocking(False)
        worker.send(flood)
    turns = 0
    served: set[int] = set()
    while len(served) < count:
        turn(pump)
        turns += 1
        now = {number for number, (_, client) in enumerate(outs) if _readable(client)}
        assert 0 < len(now - served) <= 64
        served |= now
    assert turns == -(-count // 64)
    pump.close()
    for sock in (s for pair in (*pairs, *outs) for s in pair):
        sock.close()


def _readable(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_places_grow_while_streams_move() -> None:
    """A stream comes back, and Python adds many more before the turn goes on."""
    pump = _pump.Pump(MARKS)
    pairs = [socket.socketpair() for _ in range(150)]
    dst, client = socket.socketpair()

    def back(*_: object) -> None:
        for _, src in pairs[2:]:
            pump.add(src.fileno(), dst.fileno(), 0.0, print)

    pump.add(pairs[0][1].fileno(), dst.fileno(), 0.0, back)
    pump.add(pairs[1][1].fileno(), dst.fileno(), 0.0, print)
    pairs[0][0].sendall(b"x")
    pairs[1][0].sendall(chunk(TOKENS[0]))
    turn(pump)
    assert (len(pump), client.recv(1 << 16)) == (149, chunk(TOKENS[0]))
    pump.close()
    assert len(pump) == 0
    for sock in (s for pair in (*pairs, (dst, client)) for s in pair):
        sock.close()


# ------------------------------------------------------------------------------- faults, ends


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fault_of_one_stream_is_told_and_the_others_go_on() -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError

    pump = _pump.Pump(MARKS)
    backs: list[tuple[object, ...]] = []
    pairs = [socket.socketpair() for _ in range(3)]
    pump.add(pairs[0][1].fileno(), pairs[2][0].fileno(), 0.0, fault)
    pump.add(pairs[1][1].fileno(), pairs[2][0].fileno(), 0.0, lambda *back: backs.append(back))
    for worker, _ in pairs[:2]:
        worker.sendall(b"x")
    turn(pump)
    assert (len(pump), backs) == (0, [(b"", b"x", 0, 0.0)])
    pump.close()
    for sock in (s for pair in pairs for s in pair):
        sock.close()


def test_a_pump_that_was_closed() -> None:
    with Line() as line:
        stream, number = line.stream, line.pump.fileno()
        line.pump.close()
        line.pump.close()
        line.serve()
        assert stream is not None
        assert (line.pump.take(stream), len(line.pump), line.pump.fileno()) == (None, 0, -1)
        with pytest.raises(OSError):
            os.fstat(number)
        with pytest.raises(ValueError):
            line.pump.add(line.src.fileno(), line.dst.fileno(), 0.0, print)


def test_a_pump_closed_by_a_stream_that_comes_back() -> None:
    pump = _pump.Pump(MARKS)
    pairs = [socket.socketpair() for _ in range(3)]
    for _, src in pairs[:2]:
        pump.add(src.fileno(), pairs[2][0].fileno(), 0.0, lambda *_: pump.close())
    for worker, _ in pairs[:2]:
        worker.sendall(b"x")
    turn(pump)
    assert len(pump) == 0
    for sock in (s for pair in pairs for s in pair):
        sock.close()


def test_a_pump_in_a_cycle_is_collected() -> None:
    class Owner:
        pump: _pump.Pump

        def back(self, *_: object) -> None:
            return

    owner = Owner()
    owner.pump = _pump.Pump(MARKS)
    src, dst = socket.socketpair()
    with src, dst:
        owner.pump.add(src.fileno(), dst.fileno(), 0.0, owner.back)
        number, gone = owner.pump.fileno(), weakref.ref(owner)
        del owner
        gc.collect()
        assert gone() is None
        with pytest.raises(OSError):
            os.fstat(number)


@pytest.mark.parametrize("marks", [(b"",), (b"a",), ("ab",), (b"ab",) * 17, [b"ab"]])
def test_marks_that_are_none(marks: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        _pump.Pump(marks)  # type: ignore[arg-type]
