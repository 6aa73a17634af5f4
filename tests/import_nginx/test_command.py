"""The command line of `import-nginx`."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_proxy.cli import main
from omni_proxy.config import load

NGINX = """
http {
    include mime.types;
    upstream prefill { server 10.0.0.1:8000; }
    upstream decode { least_conn; server 10.0.0.2:8000 weight=2; }
    server {
        listen 8080;
        location / { proxy_pass http://prefill; gzip on; }
        location /d { proxy_pass http://decode; }
    }
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "nginx.conf"
    path.write_text(NGINX)
    return path


def test_what_it_writes_can_be_loaded(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "omni.yaml"
    assert main(["import-nginx", str(source), "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert [line for line in said.err.splitlines() if line.startswith("NOT") or "gzip" in line] == [
        "NOT carried over:",
        "  nginx.conf:8: gzip on: answers go out as the workers send them",
    ]
    config = load(out)
    assert [w.role.value for w in config.workers] == ["prefill", "decode"]
    assert main(["import-nginx", str(source)]) == 0
    assert capsys.readouterr().out == out.read_text()


@pytest.mark.parametrize("arguments", [["--prefill", "nobody"], ["-o", "/nowhere/at/all"]])
def test_faults_are_one_line_and_exit_code_2(
    source: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["import-nginx", str(source), *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_nothing_usable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nginx.conf"
    path.write_text("http { upstream a { server unix:/s; } server { location / { proxy_pass http://a; } } }")
    assert main(["import-nginx", str(path)]) == 2
    said = capsys.readouterr().err
    assert "no worker is left" in said
    assert "Unix sockets" in said
