"""Requests that two readers might understand in two ways, to the real front over sockets.

The worker behind it records what reached it. Of each request exactly one of two things may come: it is refused and
nothing reaches a worker, or it is understood as RFC 9112 says, and then the worker gets that and nothing more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import pytest

from tests.relay.conftest import Rig, Start
from tests.relay.raw import RawClient, chat, post
from tests.relay.scripted import Seen, decode_answer, prefill_ok

BODY = chat()
MARK = b"SMUGGLED"
INNER = json.dumps({"model": "m", "prompt": MARK.decode()}).encode()
HIDDEN = post(INNER, path="/v1/completions")
ROUTE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"content-length: %d\r\n" % len(BODY)


def request(lines: bytes, body: bytes = b"", start: bytes = ROUTE) -> bytes:
    return start + lines + b"\r\n" + body


# Each ends with a request that must not be taken for one.
REFUSED: dict[str, bytes] = {
    "CL.TE": request(b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % len(CHUNKED), CHUNKED),
    "TE.CL": request(b"transfer-encoding: chunked\r\ncontent-length: 4\r\n", CHUNKED),
    "CL.TE with a body of no chunks": request(b"content-length: 5\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n"),
    "two lengths": request(b"content-length: 0\r\n" + LENGTH, BODY),
    "the same length twice": request(LENGTH * 2, BODY),
    "lengths in a list": request(b"content-length: %d, %d\r\n" % (len(BODY), len(BODY)), BODY),
    "length with a sign": request(b"content-length: +%d\r\n" % len(BODY), BODY),
    "length below nothing": request(b"content-length: -1\r\n", BODY),
    "length in hex": request(b"content-length: 0x%x\r\n" % len(BODY), BODY),
    "length with a point": request(b"content-length: %d.0\r\n" % len(BODY), BODY),
    "length of two words": request(b"content-length: 1 %d\r\n" % len(BODY), BODY),
    "length without end": request(b"content-length: 99999999999999999999999999\r\n", BODY),
    "length of other digits": request("content-length: ٣\r\n".encode(), BODY),
    "space before the colon of a length": request(b"content-length : %d\r\n" % len(BODY), BODY),
    "space before the colon of a coding": request(b"transfer-encoding : chunked\r\n", CHUNKED),
    "unknown coding": request(b"transfer-encoding: xchunked\r\n", CHUNKED),
    "chunked is not last": request(b"transfer-encoding: chunked, identity\r\n", CHUNKED),
    "chunked in quotes": request(b'transfer-encoding: "chunked"\r\n', CHUNKED),
    "codings in two lines, the last is not chunked": request(
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", CHUNKED
    ),
    "coding and length in one, by a bare LF": request(b"x: a\ntransfer-encoding: chunked\r\n" + LENGTH, BODY),
    "coding and length in one, by a bare CR": request(b"x: a\rtransfer-encoding: chunked\r\n" + LENGTH, BODY),
    "folded coding": request(b"transfer-encoding:\r\n chunked\r\n" + LENGTH, BODY),
    "folded line": request(b"x: a\r\n b\r\n" + LENGTH, BODY),
    "folded first line": ROUTE.replace(b"host", b" host") + LENGTH + b"\r\n" + BODY,
    "NUL in a value": request(b"x: a\x00b\r\n" + LENGTH, BODY),
    "NUL in a name": request(b"x\x00: a\r\n" + LENGTH, BODY),
    "no name": request(b": a\r\n" + LENGTH, BODY),
    "no colon": request(b"transfer-encoding chunked\r\n" + LENGTH, BODY),
    "a name with odd characters": request(b"x(y): a\r\n" + LENGTH, BODY),
    "vertical tab before the coding": request(b"transfer-encoding: \x0bchunked\r\n", CHUNKED),
    "bare LF everywhere": request(LENGTH, BODY).replace(b"\r\n", b"\n"),
    "bare CR everywhere": request(LENGTH, BODY).replace(b"\r\n", b"\r"),
    "another version": request(LENGTH, BODY, ROUTE.replace(b"1.1", b"1.9")),
    "no version": request(LENGTH, BODY, ROUTE.replace(b" HTTP/1.1", b"")),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "chunk size with a sign": request(b"transfer-encoding: chunked\r\n", b"+" + CHUNKED),
    "chunk size below nothing": request(b"transfer-encoding: chunked\r\n", b"-" + CHUNKED),
    "chunk size in 0x": request(b"transfer-encoding: chunked\r\n", b"0x" + CHUNKED),
    "no chunk size": request(b"transfer-encoding: chunked\r\n", b"\r\n" + CHUNKED),
    "chunk size of a coming round": request(b"transfer-encoding: chunked\r\n", b"1000000000000000" + CHUNKED),
    "chunk longer than it says": request(
        b"transfer-encoding: chunked\r\n", b"2\r\n" + BODY + b"\r\n0\r\n\r\n"
    ),
    "chunk size ends in a bare LF": request(b"transfer-encoding: chunked\r\n", CHUNKED.replace(b"\r\n", b"\n", 1)),
    "chunk ends in a bare LF": request(
        b"transfer-encoding: chunked\r\n", b"%x\r\n%b\n0\r\n\r\n" % (len(BODY), BODY)
    ),
    "bare LF in a chunk extension": request(
        b"transfer-encoding: chunked\r\n", CHUNKED.replace(b"\r\n", b";a\nb\r\n", 1)
    ),
    "NUL in a chunk extension": request(
        b"transfer-encoding: chunked\r\n", CHUNKED.replace(b"\r\n", b";a\x00\r\n", 1)
    ),
    "length in a trailer": request(
        b"transfer-encoding: chunked\r\n", CHUNKED[:-2] + b"content-length: 9\r\n\r\n"
    ),
    "a tunnel": b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nhost: x\r\n\r\n",
}  # fmt: skip

# Legal, if odd: one request with BODY, then the one behind it.
TAKEN: dict[str, bytes] = {
    "plain": request(LENGTH, BODY),
    "chunked": request(b"transfer-encoding: chunked\r\n", CHUNKED),
    "chunked in capitals": request(b"Transfer-Encoding: CHUNKED\r\n", CHUNKED),
    "chunk extension": request(b"transfer-encoding: chunked\r\n", CHUNKED.replace(b"\r\n", b";a=b;c\r\n", 1)),
    "zeros before the chunk size": request(b"transfer-encoding: chunked\r\n", b"000" + CHUNKED),
    "a trailer": request(b"transfer-encoding: chunked\r\n", CHUNKED[:-2] + b"x-evil: 1\r\n\r\n"),
    "tab around a value": request(b"content-length:\t%d\t\r\n" % len(BODY), BODY),
    "two spaces": request(LENGTH, BODY, ROUTE.replace(b" /v1", b"  /v1")),
    "empty line before": b"\r\n" + request(LENGTH, BODY),
    "a coding spelled otherwise": request(b"transfer_encoding: chunked\r\ncontent_length: 1\r\n" + LENGTH, BODY),
    "hop-by-hop length": request(b"connection: content-length, x-forwarded-for, host\r\n" + LENGTH, BODY),
    "an offer of h2c": request(
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n" + LENGTH, BODY
    ),
    "a request as a query": request(LENGTH, BODY, ROUTE.replace(b"completions", b"completions?a=%0d%0a%0d%0aGET")),
}


async def answer(seen: Seen) -> None:
    await seen.answer(200, decode_answer())


async def send(rig: Rig, data: bytes, cuts: Iterable[int]) -> RawClient:
    client = await rig.raw()
    before = 0
    for cut in (*cuts, len(data)):
        client.writer.write(data[before:cut])
        if cut != len(data):
            await asyncio.sleep(0.002)
        before = cut
    return client


def cuts_of(data: bytes) -> list[list[int]]:
    """All at once; in two after the head; in three within names and sizes."""
    end = data.find(b"\r\n\r\n") + 4
    return [[], [end] if end > 3 else [], [len(data) // 3, 2 * len(data) // 3]]


async def statuses(client: RawClient) -> list[int]:
    """All that comes until the connection ends, or is silent."""
    found = []
    try:
        async with asyncio.timeout(0.5):
            while True:
                found.append((await client.response()).status)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        pass
    return found


def reached(rig: Rig) -> list[bytes]:
    """Bodies that a worker got, and a loud complaint where one is not from a request that was meant."""
    return [seen.body for worker in rig.workers.values() for seen in worker.seen]


@pytest.mark.parametrize("way", [0, 1, 2], ids=["whole", "head apart", "in thirds"])
async def test_what_is_ambiguous_is_refused(start: Start, way: int) -> None:
    rig = await start(m0=answer)
    wrong = {}
    for name, first in REFUSED.items():
        data = first + HIDDEN
        client = await send(rig, data, cuts_of(data)[way])
        found = await statuses(client)
        closed = client.reader.at_eof()
        if found != [400] or not closed or reached(rig):
            wrong[name] = (found, closed, reached(rig))
            rig["m0"].seen.clear()
        client.close()
    assert not wrong
    await rig.idle()


@pytest.mark.parametrize("way", [0, 1, 2], ids=["whole", "head apart", "in thirds"])
async def test_what_is_legal_is_one_request(start: Start, way: int) -> None:
    rig = await start(m0=answer)
    wrong = {}
    for name, first in TAKEN.items():
        data = first + post(INNER, "connection: close\r\n", path="/v1/completions")
        client = await send(rig, data, cuts_of(data)[way])
        found = await statuses(client)
        seen = [(one.path, one.body) for one in rig["m0"].seen]
        headers = {key for one in rig["m0"].seen for key in one.headers}
        odd = headers & {"transfer-encoding", "transfer_encoding", "content_length", "x-evil", "upgrade", "connection"}
        expected = [("/v1/chat/completions", BODY), ("/v1/completions", INNER)]
        if (found, seen) != ([200, 200], expected) or odd:
            wrong[name] = (found, seen, odd)
        rig["m0"].seen.clear()
        client.close()
    assert not wrong
    await rig.idle()


async def test_a_body_of_another_route_is_no_request(start: Start) -> None:
    rig = await start(m0=answer)
    for method, path in (("GET", "/health"), ("POST", "/health"), ("GET", "/nope"), ("GET", "/v1/chat/completions")):
        for framing, body in (
            (b"content-length: %d\r\n" % len(HIDDEN), HIDDEN),
            (b"transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)),
        ):
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n".encode()
            client = await send(rig, head + framing + b"\r\n" + body + post(BODY, "connection: close\r\n"), [])
            found = await statuses(client)
            assert len(found) == 2
            assert found[-1] == 200
            assert reached(rig) == [BODY]
            rig["m0"].seen.clear()
            client.close()
    await rig.idle()


async def test_pipelined_requests_of_all_kinds_keep_their_order(start: Start) -> None:
    rig = await start(m0=answer)
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    bodies = [chat(user=str(number)) for number in range(4)]
    chunked = request(b"transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(bodies[2]), bodies[2]))
    data = get + post(bodies[0]) + get + post(bodies[1]) + chunked + get + post(b"{", "") + post(bodies[3])
    for cuts in ([], list(range(97, len(data), 97))):
        client = await send(rig, data + b"GET /nope HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", cuts)
        assert await statuses(client) == [200, 200, 200, 200, 200, 200, 400, 200, 404]
        assert reached(rig) == bodies
        rig["m0"].seen.clear()
        client.close()
    await rig.idle()


async def test_what_a_bad_request_stands_behind_is_answered(start: Start) -> None:
    rig = await start(m0=answer)
    for name in ("CL.TE", "two lengths", "folded line", "bare LF everywhere"):
        client = await send(rig, post(BODY) + REFUSED[name] + HIDDEN, [])
        found = await statuses(client)
        assert found[0] == 200
        assert client.reader.at_eof()
        assert reached(rig) == [BODY]
        rig["m0"].seen.clear()
        client.close()


async def test_no_client_names_an_upstream(start: Start) -> None:
    """Where a request goes is the config's business: not the target's, the host's, a header's or a field's."""
    elsewhere: list[bytes] = []

    async def caught(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        elsewhere.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(caught, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    rig = await start(p0=prefill_ok, d0=answer)
    there = f"127.0.0.1:{port}"
    names = ("x-prefiller-host-port", "x-prefiller-url", "x-encoder-hosts-ports", "x-data-parallel-host-port",
             "x-original-url", "forwarded", "x-forwarded-host", "x-forwarded-for", "location")  # fmt: skip
    fields = {
        "kv_transfer_params": {"remote_host": "127.0.0.1", "remote_port": port, "do_remote_prefill": True},
        "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "ec_transfer_params": {"remote_host": there},
    }  # fmt: skip
    client = await rig.raw()
    await client.send(post(chat(**fields), "".join(f"{name}: http://{there}\r\n" for name in names)))
    assert (await client.response()).status == 200
    for leg in ("p0", "d0"):
        assert not {"bootstrap_host", "bootstrap_port", "ec_transfer_params"} & rig[leg].seen[0].json.keys()
        assert rig[leg].seen[0].json["kv_transfer_params"].get("remote_port") != port
        assert rig[leg].seen[0].headers["host"] == f"127.0.0.1:{rig[leg].port}"
    for target in (f"http://{there}/v1/chat/completions", f"//{there}/v1/chat/completions", f"{there}"):
        client = await rig.raw()
        await client.send(post(BODY, "connection: close\r\n", path=target))
        assert (await client.response()).status in (400, 404, 405)
    server.close()
    assert len(rig["p0"].seen) == 1
    assert not elsewhere
    await rig.idle()


async def test_a_workers_redirect_is_not_followed(start: Start) -> None:
    async def redirect(seen: Seen) -> None:
        await seen.answer(307, b"", extra="location: http://169.254.169.254/latest/meta-data\r\n")

    rig = await start(m0=redirect)
    answer_ = await rig.chat()
    assert answer_.status_code == 502
    assert "location" not in answer_.headers
    assert len(rig["m0"].seen) == 1
