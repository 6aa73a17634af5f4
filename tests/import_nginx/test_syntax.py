"""Reading nginx's syntax."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_proxy.config import ConfigError
from omni_proxy.import_nginx.syntax import host_port, parameters, read, seconds, size_bytes


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("512", 512), ("8k", 8192), ("64M", 64 << 20), ("1g", 1 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "value"), [("30", 30), ("30s", 30), ("500ms", 0.5), ("1m30s", 90), ("1h 30m", 5400), ("1d", 86400)]
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "m", "1x", "-1", "$size", "1.5m"])
def test_what_is_neither_size_nor_time(text: str) -> None:
    with pytest.raises(ValueError):
        size_bytes(text)
    with pytest.raises(ValueError):
        seconds(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1:8000", ("10.0.0.1", 8000)),
        ("worker", ("worker", 80)),
        ("[fd00::1]:8000", ("fd00::1", 8000)),
        ("[::1]", ("::1", 80)),
        ("*:8080", ("*", 8080)),
    ],
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert host_port(text, 80) == found


@pytest.mark.parametrize("text", ["unix:/run/x.sock", "", "a:b", "fd00::1", "a:1:2", "a:65536"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):
        host_port(text, 80)


def test_parameters() -> None:
    assert parameters(["weight=3", "backup", "a=b=c"]) == {"weight": "3", "backup": "", "a": "b=c"}


def test_includes_stand_in_their_places(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "one.conf").write_text("upstream one { server a; }\n")
    main = tmp_path / "nginx.conf"
    main.write_text("http {\n include conf.d/*.conf;\n include mime.types;\n server { listen 80; }\n}\n")
    parsed = read(main)
    (http,) = parsed.top.block
    assert [d.name for d in http.block] == ["include", "upstream", "include", "server"]
    assert [d.where for d in http.block] == [
        "nginx.conf:2",
        f"{Path('conf.d') / 'one.conf'}:1",
        "nginx.conf:3",
        "nginx.conf:4",
    ]
    (missing,) = parsed.missing
    assert missing.startswith("nginx.conf:3: No such file")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http { server { listen 80 } }", 'nginx.conf:1: directive "listen" is not terminated'),
        ("http {\n", "nginx.conf:1: unexpected end of file"),
        ("http { client_max_body_size; }", "nginx.conf:1: invalid number of arguments"),
        ("http { include nginx.conf; }", "includes itself"),
    ],
)
def test_faults_in_the_file(tmp_path: Path, text: str, says: str) -> None:
    main = tmp_path / "nginx.conf"
    main.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(main)
    assert says in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "nginx.conf")
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path)
