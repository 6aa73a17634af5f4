"""A config file read again."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from omni_proxy.config import Config, ConfigError, load
from omni_proxy.reload import CHANGEABLE, Reloads, reload_whenever

WORKER = {"name": "p0", "url": "http://p0:1", "role": "prefill"}


def write(path: Path, **config: Any) -> Path:
    path.write_text(json.dumps(config))
    return path


def fine(config: Config) -> None:
    return


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "omni.yaml", workers=[WORKER])


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_what_can_change_changes_and_the_rest_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reloads = Reloads(path, load(path), fine)
    write(path, workers=[], limits={"max_waiting_requests": 7}, listen={"port": 1}, processes=2)
    config = reloads.again()
    assert config is reloads.config
    assert config is not None
    assert (config.workers, config.limits.max_waiting_requests) == ((), 7)
    assert (config.listen.port, config.processes) == (8000, 1)
    assert (reloads.generation, reloads.failed) == (2, 0)
    assert said(caplog, logging.WARNING) == [
        "listen: a change needs a restart, the old setting stays",
        "processes: a change needs a restart, the old setting stays",
    ]
    assert said(caplog, logging.INFO) == ["the config was loaded again (generation 2); changed: workers, limits"]


def test_a_file_with_faults_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reloads = Reloads(path, load(path), fine)
    before = reloads.config
    write(path, workers=[{**WORKER, "weight": 0}], limit={})
    assert reloads.again() is None
    assert reloads.config is before
    assert (reloads.generation, reloads.failed) == (1, 1)
    told = said(caplog, logging.ERROR)
    assert len(told) == 2
    assert all("the old one stays" in line for line in told)
    assert any("workers[0].weight" in line for line in told)
    path.unlink()
    assert reloads.again() is None
    assert reloads.failed == 2


def test_what_only_shows_in_use_is_a_fault_too(path: Path) -> None:
    def refuse(config: Config) -> None:
        raise ConfigError("access_log.path: cannot open /x")

    reloads = Reloads(path, load(path), refuse)
    assert reloads.again() is None
    assert reloads.failed == 1


def test_what_can_change_is_named_as_in_the_config() -> None:
    assert Config.model_fields.keys() > CHANGEABLE


async def test_each_time_somebody_asks_the_newest_file_is_applied(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reloads, asked = Reloads(path, load(path), fine), asyncio.Event()
    applied: asyncio.Queue[Config | None] = asyncio.Queue()

    def apply(config: Config | None) -> None:
        applied.put_nowait(config)
        if config is not None and config.limits.max_waiting_requests == 1:
            raise RuntimeError("a fault of ours")

    following = asyncio.create_task(reload_whenever(asked, reloads, apply))
    for number in (1, 2):
        write(path, limits={"max_waiting_requests": number})
        asked.set()
        config = await applied.get()
        assert config is not None
        assert config.limits.max_waiting_requests == number
    write(path, odd=1)
    asked.set()
    assert await applied.get() is None
    following.cancel()
    assert "a config was not put to use" in said(caplog, logging.ERROR)
