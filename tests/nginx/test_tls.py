"""HTTPS towards clients and towards workers, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from omni_proxy.config import ConfigError, Worker, parse
from omni_proxy.parts import check_worker_tls
from omni_proxy.tls import ClientFiles, ServerFiles, client_context, server_context
from tests.nginx.certificates import Authority
from tests.nginx.rig import CHAT, TlsWorker, entry, in_process, started, until
from tests.relay.scripted import DONE, ScriptedWorker, decode_stream, prefill_ok

pytestmark = pytest.mark.slow


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca", "one")


def client_of(port: int, authority: Authority, **files: str) -> httpx.AsyncClient:
    context = client_context(ClientFiles(ca=str(authority.file), **files))  # type: ignore[arg-type]
    return httpx.AsyncClient(verify=context, base_url=f"https://127.0.0.1:{port}", trust_env=False)


async def shown(port: int) -> bytes:
    """The certificate that a new connection is shown."""
    context = client_context(ClientFiles(verify=False))
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ssl.SSLError):
        await writer.wait_closed()
    return certificate


async def test_https_for_clients_and_certificates_that_change_under_streams(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    tls = {"certificate": str(certificate), "key": str(key)}
    async with started(p0=ScriptedWorker(prefill_ok), d0=ScriptedWorker(decode_stream)) as workers:
        config = {"listen": {"tls": tls}, "workers": [entry(n, w) for n, w in workers.items()]}
        async with in_process(config) as (_, port), client_of(port, authority) as client:
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert answer.status_code == 200
            assert answer.content.endswith(DONE)
            assert (await client.get("/health")).status_code == 200
            before = await shown(port)
            authority.issue("server")
            async with asyncio.timeout(10):
                while await shown(port) == before:
                    await asyncio.sleep(0.05)
            again = await client.post("/v1/chat/completions", json=CHAT)
            assert again.status_code == 200, "the connection that was open goes on"


async def test_clients_that_must_show_a_certificate(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(authority.file)}
    mine, my_key = authority.issue("client", "client.example")
    async with started(m0=ScriptedWorker(decode_stream)) as workers:
        config = {"listen": {"tls": tls}, "workers": [entry("m0", workers["m0"])]}
        async with in_process(config) as (_, port):
            async with client_of(port, authority, certificate=str(mine), key=str(my_key)) as client:
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            async with client_of(port, authority) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health")


@contextlib.asynccontextmanager
async def tls_workers(authority: Authority, host: str, client_ca: bool) -> AsyncIterator[dict[str, ScriptedWorker]]:
    certificate, key = authority.issue("worker", host)
    ca = str(authority.file) if client_ca else None
    context = server_context(ServerFiles(str(certificate), str(key), ca))
    async with started(p0=TlsWorker(prefill_ok, context), d0=TlsWorker(decode_stream, context)) as workers:
        yield workers


@pytest.mark.parametrize("client_ca", [False, True])
async def test_https_to_workers(authority: Authority, client_ca: bool) -> None:
    """Checked against an authority, under another name than the address, with a certificate of our own."""
    mine, my_key = authority.issue("gateway", "gateway.example")
    tls = {"ca": str(authority.file), "server_name": "worker.example"}
    if client_ca:
        tls |= {"certificate": str(mine), "key": str(my_key)}
    async with tls_workers(authority, "worker.example", client_ca) as workers:
        config = {"workers": [entry(n, w, "https", tls=tls) for n, w in workers.items()]}
        async with (
            in_process(config) as (_, port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        ):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert answer.content.endswith(DONE)
            before = workers["d0"].connections
            for _ in range(3):
                assert (await client.post("/v1/chat/completions", json=CHAT)).json()["object"] == "chat.completion"
            assert workers["d0"].connections == before, "connections are kept"


async def test_a_worker_that_cannot_be_checked_is_not_used_until_it_can(authority: Authority, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(Authority(tmp_path / "other", "two").file.read_bytes())
    async with tls_workers(authority, "127.0.0.1", client_ca=False) as workers:
        limits = {"no_worker_timeout_s": 0.2}
        async with (
            in_process({"limits": limits}) as (gateway, port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        ):
            for name, worker in workers.items():
                settings = entry(name, worker, "https", tls={"ca": str(trusted)})
                gateway.scheduling.membership.add(Worker.model_validate(settings))
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
            trusted.write_bytes(authority.file.read_bytes())
            await until(lambda: all(w.up for w in gateway.scheduling.workers()))
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


def test_certificates_that_cannot_be_loaded_stop_the_start(authority: Authority) -> None:
    worker = {"name": "p0", "url": "https://p", "role": "prefill", "tls": {"ca": "/nowhere.pem"}}
    with pytest.raises(ConfigError, match=r"worker p0: tls: /nowhere.pem: there is no such file"):
        check_worker_tls(parse({"workers": [worker]}, "test"))


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        ({"url": "http://p", "tls": {}}, "'tls' needs an https URL"),
        ({"url": "https://p", "tls": {"key": "k"}}, "'key' needs 'certificate'"),
        ({"url": "https://p", "tls": {"ca": "c", "verify": False}}, "'ca' means nothing"),
    ],
)
def test_settings_that_contradict_each_other(worker: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse({"workers": [{"name": "p0", "role": "prefill", **worker}]}, "test")
