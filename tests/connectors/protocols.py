"""What each protocol puts on the wire: one entry for each connector with a handoff. The tests are the same for all.

`prefill` and `decode` are what is added to the bodies of the two legs, as patterns of bytes; `{p}` stands for P's port,
`{b}` for its bootstrap server's, `{c}` for where the gateway listens to workers.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.relay.scripted import HANDOFF, Script, Seen, prefill_answer

ASK = rb'"kv_transfer_params":\{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,' + (
    rb'"remote_block_ids":null,"remote_host":null,"remote_port":null\}'
)
GIVEN = rb'"kv_transfer_params":' + re.escape(json.dumps(HANDOFF).encode())
LLMDATADIST = {
    "remote_block_ids": [3, 4],
    "remote_cluster_id": 7,
    "remote_host_ip": "tcp://10.0.0.1:5568",
    "remote_dp_rank": 0,
    "prefilled_token": [9],
}
MET = rb'"bootstrap_host":"127.0.0.1","bootstrap_port":"{b}","bootstrap_room":"(?P<room>\d+)"'
MEETING = rb'"bootstrap_host":"127.0.0.1","bootstrap_port":{b},"bootstrap_room":(?P<room>\d+)'

RID = rb',"rid":"(?P<id>[^"]+)"'


@dataclass(frozen=True)
class Protocol:
    """One connector in one mode."""

    connector: str
    mode: str
    first: str
    """Who is asked first: p0, d0, or empty where both are asked at once."""
    prefill: bytes
    decode: bytes
    handoff: Any = None
    """`kv_transfer_params` of P's answer."""
    request_id: str = r"rid-1"
    """The pattern of `x-request-id`, with the client's own being rid-1."""
    whole_body_to_prefill: bool = False
    """P gets the client's body as it is, not one that asks for one token."""
    min_tokens: bool = False
    abort: tuple[str, str] | None = None
    """Path and body of the call that ends a leg beside the closing of its connection; `@` stands for its id."""

    @property
    def together(self) -> bool:
        """Are both workers bound before P has answered?"""
        return self.mode == "parallel"

    def prefill_script(self) -> Script:
        """P that hands over."""

        async def script(seen: Seen) -> None:
            await seen.answer(200, prefill_answer(cached=9, params=self.handoff))

        return script

    def decode_script(self, then: Script) -> Script:
        """D that asks for its prefill where the protocol wants that, and then does what `then` says."""
        if self.first != "d0":
            return then

        async def script(seen: Seen) -> None:
            assert (await ask(seen))[0] == 200
            await then(seen)

        return script


async def ask(seen: Seen, request_id: str | None = None, body: bytes | None = None) -> tuple[int, Any]:
    """What a layerwise D does: tell the gateway where the KV has to go. Returns status and answer."""
    url = urlsplit(seen.json["kv_transfer_params"]["metaserver"])
    name = f"chatcmpl-{seen.headers['x-request-id']}" if request_id is None else request_id
    return await post(url.hostname or "", url.port or 0, url.path, body or asking(name))


def asking(request_id: str) -> bytes:
    """The body of that call."""
    place = {"remote_block_ids": [[5]], "remote_engine_id": "D0", "remote_host": "127.0.0.1", "remote_port": 7001}
    said = {"token_ids": [], "request_id": request_id, "do_remote_prefill": False, "do_remote_decode": True, **place}
    return json.dumps(said).encode()


async def post(host: str, port: int, path: str, body: bytes, method: str = "POST") -> tuple[int, Any]:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ")[1]), json.loads(answer.partition(b"\r\n\r\n")[2])


_ALL = (
    Protocol("vllm-nixl", "sequential", "p0", ASK, GIVEN, HANDOFF),
    Protocol("omni", "sequential", "p0", ASK, GIVEN, HANDOFF),
    Protocol("ascend-mooncake", "sequential", "p0", rb'"min_tokens":1,' + ASK, GIVEN, HANDOFF),
    Protocol("lmcache", "sequential", "p0", b"", b""),
    Protocol(
        "omni-llmdatadist",
        "sequential",
        "p0",
        b"",
        rb'"kv_transfer_params":' + re.escape(json.dumps(LLMDATADIST).encode()),
        LLMDATADIST,
    ),
    Protocol(
        "omni-llmdatadist",
        "parallel",
        "",
        MET,
        MET
        + rb',"kv_transfer_params":\{"remote_cluster_id":"127.0.0.1","remote_request_id":"chatcmpl-(?P<id>[^"]+)"\}',
        request_id=r"rid-1-[0-9a-f]+",
    ),
    Protocol("omni", "parallel", "", ASK + b"," + MEETING, MEETING, HANDOFF),
    Protocol(
        "sglang",
        "parallel",
        "",
        MEETING + RID,
        MEETING + RID,
        request_id=r"rid-1-[0-9a-f]{16}",
        whole_body_to_prefill=True,
        abort=("/abort_request", '{"rid":"@","abort_all":false}'),
    ),
    Protocol(
        "vllm-mooncake",
        "parallel",
        "",
        rb'"kv_transfer_params":\{"do_remote_decode":true,"do_remote_prefill":false,'
        rb'"transfer_id":"(?P<room>omni-[0-9a-f]{16})"\}',
        rb'"kv_transfer_params":\{"do_remote_prefill":true,"do_remote_decode":false,'
        rb'"remote_bootstrap_addr":"http://127.0.0.1:{b}","remote_engine_id":"P0",'
        rb'"transfer_id":"(?P<room>omni-[0-9a-f]{16})"\}',
    ),
    Protocol(
        "vllm-p2p-nccl",
        "parallel",
        "p0",
        b"",
        b"",
        request_id=r"___prefill_addr_127\.0\.0\.1:4112___decode_addr_127\.0\.0\.1:4100_[0-9a-f]{32}",
    ),
    Protocol(
        "ascend-layerwise",
        "parallel",
        "d0",
        rb'"min_tokens":1,"kv_transfer_params":'
        + re.escape(asking("chatcmpl-@")).replace(b"@", rb"(?P<id>rid-1-[0-9a-f]+)"),
        rb'"kv_transfer_params":\{"do_remote_decode":false,"do_remote_prefill":true,'
        rb'"metaserver":"http://127.0.0.1:{c}/v1/metaserver"\}',
        request_id=r"rid-1-[0-9a-f]+",
    ),
)
PROTOCOLS = {f"{p.connector}-{p.mode}": p for p in _ALL}
