"""Bytes from outside that make no sense: each reader says so in its own way, and none breaks."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.apc.wire import Batch, WireError, read_batch
from omni_proxy.api.sse import MAX_EVENT_BYTES, StreamScan
from omni_proxy.api.whole import read_whole
from omni_proxy.call import HOT_PATHS, Call, parse_call
from omni_proxy.errors import Rejected
from omni_proxy.multipart import model_in_form
from omni_proxy.workers.answer import AnswerReader, BadAnswer
from omni_proxy.workers.head import read_line

PIECES = (
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 100 x\r\n\r\n",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"\r\n",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"ffffffff\r\n",
    b"data: {}\n\n",
    b"\n",
    b"\r",
    b"\x00",
    b";a=b",
    b"POST ",
    b" HTTP/1.1",
)
BYTES = st.lists(st.sampled_from(PIECES) | st.binary(max_size=6), max_size=12).map(b"".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=8)
    | st.text(max_size=8)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "block_hashes", "token_ids"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=16,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["model", "messages", "prompt", "input", "stream", "max_tokens", "n", "role", "content", "x"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(st.lists(BYTES, min_size=1, max_size=4))
@settings(max_examples=300)
def test_answers_of_workers(parts: list[bytes]) -> None:
    reader, body = AnswerReader(), []  # type: ignore[var-annotated]
    try:
        for part in parts:
            if part:
                reader.feed(part, body)
    except BadAnswer:
        return
    assert sum(map(len, body)) <= sum(map(len, parts))
    assert reader.status == 0 or 200 <= reader.status <= 999


@given(BYTES)
def test_heads(data: bytes) -> None:
    whole = read_whole(data)
    assert whole is None or data.endswith(whole.body)
    header = read_line(data)
    if header is not None:
        assert not any(byte in header[0] + header[1] for byte in (0, 10, 13))


@given(st.lists(BYTES, max_size=6), st.booleans())
def test_streams_of_events(parts: list[bytes], strip: bool) -> None:
    scan = StreamScan(strip, None)
    shown = b"".join(map(scan.feed, parts)) + scan.flush()
    whole = b"".join(parts)
    assert strip or shown == whole
    assert len(shown) <= len(whole) + MAX_EVENT_BYTES


@given(VALUES.map(lambda value: msgspec.msgpack.encode(value)) | st.binary(max_size=60))
@settings(max_examples=300)
def test_kv_events(payload: bytes) -> None:
    try:
        assert isinstance(read_batch(payload), Batch)
    except WireError:
        return


@given(st.sampled_from(sorted(HOT_PATHS)), JSON.map(msgspec.json.encode) | BYTES)
@settings(max_examples=300)
def test_bodies_of_clients(path: str, body: bytes) -> None:
    try:
        assert isinstance(parse_call(path, body), Call)
    except Rejected as exc:
        assert exc.message  # noqa: PT017


@given(BYTES)
def test_forms(body: bytes) -> None:
    try:
        assert isinstance(model_in_form(body), str)
    except Rejected:
        return
