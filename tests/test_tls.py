"""Contexts out of files, and again when the files change. Handshakes run in memory."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from omni_proxy.tls import ClientFiles, ClientTls, ServerFiles, ServerTls, TlsError, client_context, server_context
from tests.nginx.certificates import Authority


def shake(client: ssl.SSLContext, server: ssl.SSLContext, name: str = "127.0.0.1") -> tuple[ssl.SSLObject, bytes]:
    """A handshake without sockets; returns the server's side, and the certificate that the client saw."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for side in (one, other):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    shown = one.getpeercert(binary_form=True)
    assert shown is not None
    return other, shown


def der(path: Path) -> bytes:
    first = path.read_text().partition("-----END CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(first[0] + first[1])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca", "one")


def server_of(authority: Authority, stem: str = "server", client_ca: Path | None = None) -> ServerTls:
    certificate, key = authority.issue(stem)
    return ServerTls(ServerFiles(str(certificate), str(key), None if client_ca is None else str(client_ca)))


def trusting(authority: Authority, **more: str) -> ssl.SSLContext:
    return client_context(ClientFiles(ca=str(authority.file), **more))  # type: ignore[arg-type]


def test_a_client_that_knows_the_authority_is_content(authority: Authority) -> None:
    side, _ = shake(trusting(authority), server_of(authority).context)
    assert side.version() in ("TLSv1.2", "TLSv1.3")
    assert side.selected_alpn_protocol() is None


def test_http_1_1_is_what_we_speak(authority: Authority) -> None:
    client = trusting(authority)
    client.set_alpn_protocols(["h2", "http/1.1"])
    side, _ = shake(client, server_of(authority).context)
    assert side.selected_alpn_protocol() == "http/1.1"


def test_another_authority_or_name_is_refused(authority: Authority, tmp_path: Path) -> None:
    server = server_of(authority).context
    with pytest.raises(ssl.SSLCertVerificationError, match=r"self.signed|unable to get"):
        shake(trusting(Authority(tmp_path / "other", "two")), server)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        shake(trusting(authority), server, "example.org")
    shake(client_context(ClientFiles(verify=False)), server, "example.org")


def test_clients_may_have_to_show_a_certificate(authority: Authority) -> None:
    server = server_of(authority, client_ca=authority.file).context
    certificate, key = authority.issue("client", "client.example")
    client = trusting(authority, certificate=str(certificate), key=str(key))
    side, _ = shake(client, server)
    assert side.getpeercert()
    with pytest.raises(ssl.SSLError, match=r"(?i)peer did not return a certificate"):
        shake(trusting(authority), server)


def test_new_files_serve_the_next_handshake(authority: Authority) -> None:
    server = server_of(authority)
    assert not server.refresh(), "nothing has changed"
    old, _ = authority.issue("server")
    assert server.refresh()
    _, shown = shake(trusting(authority), server.context)
    assert shown == der(old)
    assert not server.refresh()
    assert server.refresh(force=True)


def test_files_that_do_not_fit_change_nothing(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    server = server_of(authority)
    _, before = shake(trusting(authority), server.context)
    certificate, key = authority.issue("server")
    kept = key.read_bytes()
    _, other = authority.issue("other")
    key.write_bytes(other.read_bytes())
    assert not server.refresh()
    assert not server.refresh(), "it is said once"
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "stays as it was" in record.getMessage()
    assert shake(trusting(authority), server.context)[1] == before
    key.write_bytes(kept)
    assert server.refresh()
    assert shake(trusting(authority), server.context)[1] == der(certificate)


def test_the_client_side_follows_its_files_too(authority: Authority, tmp_path: Path) -> None:
    client = ClientTls(ClientFiles(ca=str(authority.file), server_name="worker.example"))
    assert client.server_name == "worker.example"
    other = Authority(tmp_path / "other", "two")
    server = server_of(other).context
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(client.context, server)
    authority.file.write_bytes(other.file.read_bytes())
    assert client.refresh()
    shake(client.context, server)


def test_a_key_may_stand_behind_its_certificate(authority: Authority) -> None:
    certificate, key = authority.issue("both")
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    assert server_context(ServerFiles(str(certificate)))


ENCRYPTED = "-----BEGIN ENCRYPTED PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("content", "says"), [(None, "no such file"), (b"nothing", "cannot be used"), (b"\xff\xfe", "cannot be used")]
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    authority: Authority, tmp_path: Path, content: bytes | None, says: str
) -> None:
    bad = tmp_path / "bad.pem"
    if content is not None:
        bad.write_bytes(content)
    certificate, key = authority.issue("server")
    for files in (
        ServerFiles(str(bad), str(key)),
        ServerFiles(str(certificate), str(bad)),
        ServerFiles(str(certificate), str(key), str(bad)),
    ):
        with pytest.raises(TlsError, match=says) as caught:
            server_context(files)
        assert "bad.pem" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(TlsError, match=says):
        client_context(ClientFiles(ca=str(bad)))


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(authority: Authority) -> None:
    from cryptography.hazmat.primitives import serialization as s

    certificate, key = authority.issue("server")
    loaded = s.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(loaded.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret")))
    with pytest.raises(TlsError, match="cannot be used"):
        server_context(ServerFiles(str(certificate), str(key)))
