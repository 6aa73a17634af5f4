"""Our readers of HTTP against llhttp: what they take, it takes too, and understands in the same way."""

from __future__ import annotations

import httptools
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_proxy.api.whole import read_whole
from omni_proxy.workers.answer import AnswerReader, BadAnswer


class Parsed:
    """What llhttp makes of some bytes."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.begun = self.heads = self.ended = 0
        self.parser: httptools.HttpResponseParser | None = None
        self.keep = False

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.heads:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.heads += 1
        if self.parser is not None:
            self.keep = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ended += 1


HEADERS = (
    b"Host: a:1", b"content-type: application/json", b"X-Request-Id: abc", b"Connection: keep-alive", b"a:",
    b"A: \t b \t", b"connection: close", b"Transfer-Encoding: chunked", b"Content-Length: 3", b"content-length: 03",
    b"content-length: +3", b"Expect: 100-continue", b"upgrade: h2c", b"a b: c", b"a : c", b" folded", b"x: \xe9",
    b"x: a\x00b", b"x: a\rb", b"x: a\nb",
    b"x; y: z", b"content_length: 9", b"Content-Length: 3, 3", b"te: trailers", b"keep-alive: 5",
)  # fmt: skip
LINES = st.lists(st.sampled_from(HEADERS), max_size=6)
ROUTE = b"POST /v1/chat/completions HTTP/1.1"


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes, whole or with one place changed."""
    at = draw(st.integers(0, len(data)))
    return draw(
        st.sampled_from([data, data, data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 2)) :]])
    )


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    start = draw(st.sampled_from([ROUTE, ROUTE, b"POST /v1/completions HTTP/1.0", b"GET / HTTP/1.1", ROUTE + b" "]))
    body = draw(st.sampled_from([b"", b"{}", b'{"a":1}', b"abc"]))
    length = draw(st.sampled_from([b"Content-Length: %d" % len(body)] * 4 + [b"x: y"]))
    head = b"\r\n".join([start, *draw(LINES), length])
    return draw(damaged(head + b"\r\n\r\n" + body))


@given(requests())
@settings(max_examples=400)
@example(ROUTE + b"\r\ncontent-length: 2\r\n\r\n{}")
def test_a_whole_request_is_one_for_llhttp_too(data: bytes) -> None:
    whole = read_whole(data)
    if whole is None:
        return
    parsed = Parsed()
    parser = httptools.HttpRequestParser(parsed)
    parser.feed_data(data)
    assert (parsed.begun, parsed.heads, parsed.ended) == (1, 1, 1)
    head = whole.head
    assert (parsed.url, parsed.body) == (head.path, whole.body)
    others = [(name, value.strip(b" \t")) for name, value in parsed.headers if name != b"content-length"]
    assert others == head.headers
    assert parser.get_method() == b"POST"
    assert parser.should_keep_alive()
    assert not parser.should_upgrade()


def test_the_usual_request_is_recognised() -> None:
    whole = read_whole(ROUTE + b"\r\nHost: x\r\nX-Request-Id: i\r\ncontent-length: 2\r\n\r\n{}")
    assert whole is not None
    assert (whole.head.path, whole.head.request_id, whole.body) == (b"/v1/chat/completions", b"i", b"{}")


@given(requests(), requests())
@settings(max_examples=400)
@example(ROUTE + b"\r\ncontent-length: 2 \r\na: 7\r\n\r\n{}", ROUTE + b"\r\ncontent-length: 0 \r\na: 7\r\n\r\n")
@example(ROUTE + b"\r\ncontent-length: 2\r\n\r\n{}", ROUTE + b"\r\ncontent-length: \r\n\r\n")
@example(ROUTE + b"\r\ncontent-length: 2\r\n\r\n{}", ROUTE + b"\r\ncontent-length: 0000000000002\r\n\r\n{}")
def test_a_head_like_the_one_before_is_read_as_any_other(first: bytes, second: bytes) -> None:
    before = read_whole(first)
    if before is None:
        return
    for data in (first, second, first.replace(b": 3", b": 3 ")):
        again, anew = read_whole(data, before.head), read_whole(data)
        assert (again is None) == (anew is None)
        if again is not None and anew is not None:
            assert (again.head.path, again.head.headers) == (anew.head.path, anew.head.headers)
            assert (again.head.request_id, again.body) == (anew.head.request_id, anew.body)


def test_a_head_that_repeats_is_not_read_again() -> None:
    first = read_whole(ROUTE + b"\r\nContent-Length: 2\r\nHost: x\r\n\r\n{}")
    assert first is not None
    second = read_whole(ROUTE + b'\r\nContent-Length: 11\r\nHost: x\r\n\r\n{"a":"bcd"}', first.head)
    assert second is not None
    assert second.head is first.head
    assert second.body == b'{"a":"bcd"}'


def test_a_workers_head_that_repeats_is_read_once_unless_it_has_secrets() -> None:
    head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\nx-repeats: yes\r\ncontent-length: 2\r\n%b\r\n"
    for line, shared in ((b"", True), (b"Set-Cookie: a=b\r\n", False), (b"x-request-id: 7\r\n", False)):
        first, second = AnswerReader(), AnswerReader()
        bodies: list[bytes] = []
        for reader, body in ((first, b"ab"), (second, b"cd")):
            reader.feed(head % line + body, bodies)
            assert reader.complete
            assert reader.keep
        assert bodies == [b"ab", b"cd"]
        assert first.head is not None
        assert second.head is not None
        assert first.head.headers == second.head.headers
        assert (first.head is second.head) is shared


HEADS = (
    b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n",
    b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nserver: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length:%d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: %d \r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx-request-id: 7\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n",
    b"HTTP/1.1 200 OK\r\nserver: y\r\n\r\n%d",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1%d2345678901234\r\n\r\n",
)


def seen(reader: AnswerReader, data: bytes) -> object:
    """All that a reader tells of one answer that comes in one read."""
    body: list[bytes] = []
    reader.reset()
    try:
        reader.feed(data, body)
    except BadAnswer as exc:
        return str(exc)
    head = reader.head if reader.status else None
    told = None if head is None else (head.status, head.headers, head.content_type, head.lines)
    return reader.status, told, reader.keep, reader.complete, reader.excess, reader.until_eof, b"".join(body)


@given(st.lists(st.tuples(st.sampled_from(HEADS), st.integers(0, 12), st.integers(0, 120)), min_size=2, max_size=6))
def test_a_workers_head_like_the_one_before_is_read_as_any_other(asked: list[tuple[bytes, int, int]]) -> None:
    """The same connection again and again, against a new one each time; some of the answers are cut off."""
    one = AnswerReader()
    for head, length, cut in asked:
        data = (head % length + b"{" + b"x" * 11)[: max(1, len(head) + cut - 60)]
        assert seen(one, data) == seen(AnswerReader(), data), data


def test_a_length_that_differs_is_no_other_head() -> None:
    reader = AnswerReader()
    told = [seen(reader, HEADS[0] % length + b"x" * length) for length in (0, 3, 10, 0, 7)]
    first = reader.head
    assert [t[3:] for t in told if isinstance(t, tuple)] == [(True, False, False, b"x" * n) for n in (0, 3, 10, 0, 7)]
    seen(reader, HEADS[0] % 5)
    assert reader.head is first


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    start = draw(
        st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.0 404 x", b"HTTP/1.1 2000 x", b"HTTP/1.1 99 x"])
    )
    head = b"\r\n".join([start, *draw(LINES)])
    pieces = draw(st.lists(st.sampled_from([b"data: x\n\n", b"y", b"0123456789abcdef"]), max_size=3))
    kind = draw(st.sampled_from(["chunks", "length", "eof"]))
    if kind == "chunks":
        body = b"".join(b"%x%b\r\n%b\r\n" % (len(p), draw(st.sampled_from([b"", b";a=b"])), p) for p in pieces)
        data = head + b"\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"
    elif kind == "length":
        data = head + b"\r\ncontent-length: %d\r\n\r\n" % sum(map(len, pieces)) + b"".join(pieces)
    else:
        data = head + b"\r\n\r\n" + b"".join(pieces)
    return draw(damaged(data))


def read(data: bytes, cut: int) -> tuple[AnswerReader, bytes] | None:
    reader, body = AnswerReader(), []  # type: ignore[var-annotated]
    try:
        for part in (data[:cut], data[cut:]):
            if part:
                reader.feed(part, body)
    except BadAnswer:
        return None
    return reader, b"".join(body)


@given(answers(), st.integers(0, 400))
@settings(max_examples=400)
@example(b"HTTP/1.0 404 \nHost: a:1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 0)
def test_an_answer_is_the_same_for_llhttp(data: bytes, cut: int) -> None:
    found = read(data, cut)
    assert (found is None) == (read(data, len(data)) is None), "a cut changes what is good"
    if found is None or not found[0].complete or found[0].excess:
        return
    reader, body = found
    parsed = Parsed()
    parser = parsed.parser = httptools.HttpResponseParser(parsed)
    parser.feed_data(data)
    assert (parsed.heads, parsed.ended, parsed.body) == (1, 1, body)
    assert parser.get_status_code() == reader.status
    assert reader.head is not None
    told = [(name, value.strip(b" \t")) for name, value in parsed.headers if name != b"content-length"]
    assert told == reader.head.headers
    if reader.keep:
        assert parsed.keep


@given(st.binary(min_size=1, max_size=40), st.sampled_from([b"%x", b"%X", b"0%x", b"%x;a", b" %x"]), st.integers(-1, 1))
def test_a_framed_chunk_is_one_chunk(data: bytes, size: bytes, off: int) -> None:
    chunk = size % (len(data) + off) + b"\r\n" + data + b"\r\n"
    reader, body = AnswerReader(), []  # type: ignore[var-annotated]
    reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", body)
    try:
        reader.feed(chunk, body)
    except BadAnswer:
        return
    if reader.framed:
        assert (reader.framed, body) == (chunk, [data])
        assert not off
