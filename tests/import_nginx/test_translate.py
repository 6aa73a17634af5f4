"""What becomes of nginx's directives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config import Config, ConfigError, parse
from omni_proxy.import_nginx.notes import Fate
from omni_proxy.import_nginx.reasons import REASONS
from omni_proxy.import_nginx.settings import MAIN, PROXIED
from omni_proxy.import_nginx.syntax import Directive, Parsed, read
from omni_proxy.import_nginx.translate import translate
from omni_proxy.import_nginx.upstreams import Roles

NO_ROLES = Roles()


class Imported:
    """A translated text, and whether the result is a config of ours."""

    def __init__(self, folder: Path, text: str, roles: Roles) -> None:
        path = folder / "nginx.conf"
        path.write_text(text)
        self.data, self.notes = translate(read(path), roles)
        self.config: Config = parse(self.data, "test")

    def told(self, fate: Fate) -> list[str]:
        return [note.text for note in self.notes.of(fate)]

    @property
    def lost(self) -> list[str]:
        return self.told(Fate.LOST)

    def reason(self, text: str) -> str:
        return next(n.reason for fate in Fate for n in self.notes.of(fate) if n.text == text)


@pytest.fixture
def imported(tmp_path: Path) -> Any:
    return lambda text, roles=NO_ROLES: Imported(tmp_path, text, roles)


def proxied(inside: str = "", upstream: str = "server a:1;", server: str = "listen 80;", http: str = "") -> str:
    """A config that passes everything to one upstream."""
    location = f"location / {{ proxy_pass http://llm; {inside} }}"
    return f"http {{ {http} upstream llm {{ {upstream} }} server {{ {server} {location} }} }}"


def test_servers_become_workers(imported: Any) -> None:
    servers = """
        server 10.0.0.1:8000 weight=3 max_fails=2 fail_timeout=30s slow_start=1m;
        server 10.0.0.2:8000 max_conns=64 backup;
        server [fd00::1]:8000 down;
        server plain;
        keepalive 32; keepalive_timeout 4s;
    """
    one = imported(proxied(upstream=servers))
    first, second, third, fourth = one.config.workers
    assert (first.name, first.url, first.role.value, first.connector) == (
        "llm-0",
        "http://10.0.0.1:8000",
        "mixed",
        "aggregated",
    )
    assert (first.weight, first.max_fails, first.fail_timeout_s, first.slow_start_s) == (3, 2, 30, 60)
    assert (second.max_seqs, second.backup) == (64, True)
    assert (third.url, third.down) == ("http://[fd00::1]:8000", True)
    assert fourth.url == "http://plain:80"
    assert (one.config.keepalive.max_idle, one.config.keepalive.idle_s) == (32, 4)
    assert one.lost == []


def test_roles_by_name_or_as_said(imported: Any) -> None:
    blocks = "".join(f"upstream {n} {{ server {n}:1; }}" for n in ("my_prefill", "decoders", "encode", "left", "right"))
    places = "".join(
        f"location /{n} {{ proxy_pass http://{n}; }}" for n in ("my_prefill", "decoders", "encode", "left", "right")
    )
    text = f"http {{ {blocks} server {{ listen 80; {places} }} }}"
    roles = {w.name: (w.role.value, w.connector) for w in imported(text).config.workers}
    assert roles == {
        "my_prefill-0": ("prefill", "vllm-nixl"),
        "decoders-0": ("decode", "vllm-nixl"),
        "encode-0": ("encode", "aggregated"),
        "left-0": ("mixed", "aggregated"),
        "right-0": ("mixed", "aggregated"),
    }
    said = Roles(frozenset({"left"}), frozenset({"right", "my_prefill"}), "sglang")
    roles = {w.name: (w.role.value, w.connector) for w in imported(text, said).config.workers}
    assert roles["left-0"] == ("prefill", "sglang")
    assert roles["right-0"] == roles["my_prefill-0"] == ("decode", "sglang")
    with pytest.raises(ConfigError, match="no upstream 'nobody'"):
        imported(text, Roles(frozenset({"nobody"})))


@pytest.mark.parametrize(
    ("inside", "path", "value"),
    [
        ("client_max_body_size 32m;", "limits.client_max_body_bytes", 32 << 20),
        ("client_body_timeout 10s;", "timeouts.client_body_s", 10),
        ("send_timeout 20s;", "timeouts.client_send_s", 20),
        ("keepalive_timeout 65s 60s;", "timeouts.client_keepalive_s", 65),
        ("proxy_connect_timeout 2s;", "timeouts.connect_s", 2),
        ("proxy_read_timeout 1h;", "timeouts.first_byte_s", 3600),
        ("proxy_read_timeout 1h;", "timeouts.inter_chunk_s", 3600),
        ("proxy_next_upstream off;", "retries.max", 0),
        ("proxy_next_upstream_tries 3;", "retries.max", 2),
        ("proxy_next_upstream_tries 0;", "retries.max", 10),
        ("access_log /l.log;", "access_log.path", "/l.log"),
        ("access_log /l.log;", "access_log.format", "combined"),
        ("access_log /l.log llm_json;", "access_log.format", "json"),
        ("access_log off;", "access_log.path", None),
        ('proxy_set_header Authorization "Bearer k";', "workers.0.api_key", "k"),
    ],
)
def test_settings(imported: Any, inside: str, path: str, value: object) -> None:
    found: Any = imported(proxied(inside)).config
    for key in path.split("."):
        found = found[int(key)] if key.isdecimal() else getattr(found, key)
    assert found == value


@pytest.mark.parametrize(
    "inside",
    ["client_max_body_size 0;", "keepalive_timeout 0;", "proxy_read_timeout $t;", "access_log syslog:server=x;"],
)
def test_values_that_have_no_meaning_here_are_told_and_the_default_stays(imported: Any, inside: str) -> None:
    one = imported(proxied(inside))
    assert one.lost == [inside.rstrip(";")]
    assert one.config.model_copy(update={"workers": ()}) == Config(listen=one.config.listen)


def test_inner_blocks_win_and_what_differs_elsewhere_is_told(imported: Any) -> None:
    text = """http {
        proxy_read_timeout 10s; send_timeout 5s;
        upstream a { server a; } upstream b { server b; }
        server { listen 80; proxy_read_timeout 20s;
            location / { proxy_pass http://a; proxy_read_timeout 30s; location /in { proxy_pass http://b; } }
            location /b { proxy_pass http://b; proxy_read_timeout 40s; } } }"""
    one = imported(text)
    assert (one.config.timeouts.first_byte_s, one.config.timeouts.client_send_s) == (30, 5)
    assert one.lost == ["proxy_read_timeout 40s"]
    assert "nginx.conf:5 was kept" in one.reason("proxy_read_timeout 40s")


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("8080", "0.0.0.0", 8080), ("*:81", "0.0.0.0", 81), ("127.0.0.1", "127.0.0.1", 80), ("[::]:82", "::", 82)],
)
def test_listen(imported: Any, listen: str, host: str, port: int) -> None:
    one = imported(proxied(server=f"listen {listen} default_server backlog=99; listen 90; listen 91 udp;"))
    assert (one.config.listen.host, one.config.listen.port, one.config.listen.backlog) == (host, port, 99)
    assert one.lost == ["listen 90", "listen 91 udp"]


def test_without_listen_it_is_port_80(imported: Any) -> None:
    assert imported(proxied(server="")).config.listen.port == 80


def test_tls_in(imported: Any, tmp_path: Path) -> None:
    server = """listen 443 ssl http2; ssl_certificate c.pem; ssl_certificate_key /k.pem; ssl_certificate rsa.pem;
        ssl_client_certificate ca.pem; ssl_verify_client on; ssl_protocols TLSv1.3;"""
    one = imported(proxied(server=server))
    tls = one.config.listen.tls
    assert (str(tls.certificate), str(tls.key), str(tls.client_ca)) == (
        str(tmp_path / "c.pem"),
        "/k.pem",
        str(tmp_path / "ca.pem"),
    )
    assert one.lost == ["ssl_certificate rsa.pem", "http2"]
    optional = imported(proxied(server="listen 443 ssl; ssl_certificate c; ssl_verify_client optional;"))
    assert optional.config.listen.tls.client_ca is None
    assert optional.lost == ["ssl_verify_client optional"]
    plain = imported(proxied(server="listen 80; ssl_certificate c;"))
    assert plain.lost == ["ssl_certificate c"]
    with pytest.raises(ConfigError, match="there is no ssl_certificate"):
        imported(proxied(server="listen 443 ssl;"))


def https(inside: str) -> str:
    return proxied(inside).replace("http://llm", "https://llm")


def test_tls_out(imported: Any) -> None:
    unchecked = imported(https(""))
    (worker,) = unchecked.config.workers
    assert (worker.url, worker.tls.verify) == ("https://a:1", False)
    assert unchecked.told(Fate.CHANGED) == ["proxy_pass https://llm"]
    checked = "proxy_ssl_verify on; proxy_ssl_trusted_certificate /ca; proxy_ssl_certificate /c;"
    (worker,) = imported(https(checked + "proxy_ssl_certificate_key /k;")).config.workers
    tls = worker.tls
    assert (str(tls.ca), str(tls.certificate), str(tls.key), tls.verify) == ("/ca", "/c", "/k", True)
    assert tls.server_name == "llm", "nginx checks for the name in proxy_pass"
    (worker,) = imported(https(checked + "proxy_ssl_name real.example;")).config.workers
    assert worker.tls.server_name == "real.example"
    direct = "http { server { listen 80; location / { proxy_pass https://w.example; proxy_ssl_verify on; } } }"
    (worker,) = imported(direct).config.workers
    assert (worker.url, worker.tls.server_name) == ("https://w.example:443", None)


def test_what_is_passed_elsewhere_is_told(imported: Any) -> None:
    text = """http { upstream a { server a; server a; server unix:/s; server b resolve max_conns=0 weight=x; }
        upstream spare { server s; }
        server { listen 80; location / { proxy_pass http://a/prefix/; } location /v { proxy_pass http://$v; }
            location /files { root /srv; } }
        server { listen 81; return 301 https://x; } }"""
    one = imported(text)
    assert [w.url for w in one.config.workers] == ["http://a:80", "http://b:80"]
    expected = {"/prefix/", "server a", "server unix:/s", "resolve", "weight=x"}
    assert {*one.lost} == expected | {"proxy_pass http://$v", "location /files", "server", "upstream spare"}
    assert "max_conns=0" in one.told(Fate.CHANGED)


def test_keys_differ(imported: Any) -> None:
    text = """http { upstream a { server a; } server { listen 80;
        location / { proxy_pass http://a; proxy_set_header Authorization "Bearer one"; }
        location /two { proxy_pass http://a; proxy_set_header Authorization "Bearer two"; } } }"""
    one = imported(text)
    assert one.config.workers[0].api_key == "one"
    assert one.lost == ["proxy_pass http://a"]


def test_security_is_never_dropped_silently(imported: Any) -> None:
    inside = "allow 10.0.0.0/8; deny all; auth_basic x; limit_req zone=a; if ($a) { return 403; } auth_request /a;"
    assert imported(proxied(inside)).lost == [
        "allow 10.0.0.0/8",
        "deny all",
        "auth_basic x",
        "limit_req zone=a",
        "if $a",
        "auth_request /a",
    ]


def test_processes(imported: Any) -> None:
    assert imported("worker_processes 4; worker_shutdown_timeout 9s;" + proxied()).config.processes == 4
    auto = imported("worker_processes auto; user u; stream { }" + proxied())
    assert auto.config.processes == 1
    assert (auto.told(Fate.CHANGED), auto.lost) == (["worker_processes auto"], ["stream"])


@pytest.mark.parametrize(
    ("text", "says"), [("user u;", "no http block"), ("http { server { listen 80; } }", "proxy_pass")]
)
def test_nothing_to_import(imported: Any, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        imported(text)


def test_no_directive_has_both_a_setting_and_a_reason() -> None:
    assert not REASONS.keys() & (PROXIED.keys() | MAIN.keys())


ANY_NAME = st.sampled_from([*REASONS, *PROXIED, "listen", "server", "location", "upstream", "proxy_pass", "odd"])
WORDS = "a 0 1 -1 1m on off http://u https://u http://a:0/x u ssl a:99999 weight=0 fail_timeout=0 max_fails=-1 *:1"
ANY_ARGS = st.lists(st.sampled_from(WORDS.split()), max_size=3)


def _directive(name: str, args: list[str], block: list[Directive]) -> Directive:
    return Directive(name, tuple(args) or ("x",), "f:1", tuple(block))


@given(st.recursive(
    st.builds(_directive, ANY_NAME, ANY_ARGS, st.just([])),
    lambda inner: st.builds(_directive, ANY_NAME, ANY_ARGS, st.lists(inner, max_size=4)),
    max_leaves=30,
).map(lambda d: Directive("http", (), "f:1", (Directive("server", (), "f:1", (d,)), d))))  # fmt: skip
def test_any_tree_becomes_a_config_or_is_refused(http: Directive) -> None:
    try:
        data, _ = translate(Parsed(Directive("main", (), "f", (http,)), ()), NO_ROLES)
    except ConfigError:
        return
    parse(data, "test")
