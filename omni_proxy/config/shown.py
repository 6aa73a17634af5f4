"""The config as it may be shown to anybody."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import yaml

from omni_proxy.config.reading import SECRETS
from omni_proxy.config.whole import Config


def effective(config: Config) -> str:
    """The whole config with its defaults, as YAML; secrets are not shown."""
    data = _redacted(config.model_dump(mode="json"))
    text: str = yaml.safe_dump(data, sort_keys=False)
    return text


def _redacted(data: Any) -> Any:
    """With stars for secrets; hashes of keys are none."""
    if isinstance(data, list):
        return [_redacted(one) for one in data]
    if not isinstance(data, dict):
        return data
    return {name: _starred(name, value) if name in SECRETS else _redacted(value) for name, value in data.items()}


def _starred(name: str, value: Any) -> Any:
    if name == "redis" and isinstance(value, str):
        return _without_password(value) if "@" in value else value
    if isinstance(value, dict):
        return dict.fromkeys(value, "***")
    return "***" if isinstance(value, str) else value


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
