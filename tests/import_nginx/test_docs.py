"""docs/from-nginx.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from omni_proxy.config import Config, Worker
from omni_proxy.import_nginx.command import ImportOptions, imported
from omni_proxy.import_nginx.reasons import REASONS
from omni_proxy.import_nginx.settings import MAIN, PROXIED
from omni_proxy.import_nginx.translate import TLS_IN, TLS_OUT

PAGE = (Path(__file__).parents[2] / "docs" / "from-nginx.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z0-9_]+)`(?: in `upstream`)? \| (?:`([^`]*)`)? ?\| (.*?) ?\|$", PAGE, re.MULTILINE)
OF_SERVER = {"server", "weight", "max_conns", "max_fails", "fail_timeout", "backup", "down", "slow_start", "keepalive"}
STRUCTURE = {"listen", "location", "proxy_pass", "log_format"}


def test_the_example(tmp_path: Path) -> None:
    nginx, ours = re.findall(r"```(?:nginx|yaml)\n(.*?)```", PAGE, re.DOTALL)
    source = tmp_path / "nginx.conf"
    source.write_text(nginx)
    config, report = imported(ImportOptions(source, None))
    assert yaml.safe_load(config) == yaml.safe_load(ours)
    assert "NOT carried over" not in report


def test_every_row_is_found() -> None:
    assert len(ROWS) == sum(line.startswith("| `") for line in PAGE.splitlines())


@pytest.mark.parametrize("directive", [row[0] for row in ROWS])
def test_the_import_knows_each_directive(directive: str) -> None:
    known = REASONS.keys() | PROXIED.keys() | MAIN.keys() | TLS_IN | TLS_OUT
    assert directive in known | OF_SERVER | STRUCTURE


@pytest.mark.parametrize("setting", sorted({*re.findall(r"`((?:[a-z_]+(?:\[\])?\.)+[a-z_]+)`", PAGE)} - {"omni.yaml"}))
def test_each_setting_exists(setting: str) -> None:
    model: Any = Config
    for part in setting.split("."):
        if part == "workers[]":
            model = Worker
            continue
        assert part in model.model_fields, setting
        annotation = model.model_fields[part].annotation
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
