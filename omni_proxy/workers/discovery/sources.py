"""The sources of workers that a config names."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from omni_proxy.config import ConfigError, Discovery, Dns, Kubernetes
from omni_proxy.workers.discovery.file import FileSource
from omni_proxy.workers.discovery.finder import Source
from omni_proxy.workers.discovery.kubernetes import PodSource, SliceSource, account_token, in_cluster
from omni_proxy.workers.discovery.registered import RegisteredSource


def discovery_sources(wanted: Discovery, registered: RegisteredSource | None) -> list[Source]:
    """All of them. Raises ConfigError."""
    sources: list[Source] = []
    if wanted.file is not None:
        sources.append(FileSource(wanted.file))
    if wanted.kubernetes is not None:
        sources.append(_kubernetes(wanted.kubernetes))
    sources += [_dns(one, f"discovery.dns[{number}]") for number, one in enumerate(wanted.dns)]
    if registered is not None:
        sources.append(registered)
    return sources


def _kubernetes(wanted: Kubernetes) -> Source:
    made = SliceSource if wanted.endpoints else PodSource
    token: Callable[[], str | None] = account_token if wanted.api is None else lambda: None
    try:
        client = in_cluster() if wanted.api is None else httpx.AsyncClient(base_url=wanted.api, timeout=10.0)
        return made(client, wanted.namespace, wanted.selector, token)
    except OSError as exc:
        raise ConfigError(f"discovery.kubernetes: this is no pod with a service account ({exc})") from exc


def _dns(wanted: Dns, place: str) -> Source:
    try:
        from omni_proxy.workers.discovery.dns import DnsSource
    except ImportError as exc:
        raise ConfigError(f"{place}: needs the extra [dns]: pip install 'omni-proxy[dns]' ({exc})") from exc
    srv = wanted.record == "srv"
    try:
        return DnsSource(
            wanted.name, srv, wanted.port or 0, wanted.worker, wanted.least_s, wanted.most_s, wanted.nameserver
        )
    except ValueError as exc:
        raise ConfigError(f"{place}.nameserver: {exc} (got {wanted.nameserver!r})") from exc
