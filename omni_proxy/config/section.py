"""What all sections of the config are, and the kinds of values that several of them have."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MIB = 1 << 20


class Section(BaseModel):
    """A part of the config: what it does not know is a fault, and nothing is written to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _worker_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ValueError("must name scheme, host and port only")
    try:
        _ = parts.port
    except ValueError as exc:
        raise ValueError("has an impossible port") from exc
    return url.rstrip("/")


def _zmq_endpoint(endpoint: str) -> str:
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not host or host == "*" or not port.isdigit():
        raise ValueError("must be tcp://HOST:PORT")
    if not 1 <= int(port) <= 65535:
        raise ValueError("has an impossible port")
    return endpoint


def _host_port(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if address and (not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535):
        raise ValueError("must be HOST:PORT")
    return address


PositiveSeconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
WorkerUrl = Annotated[str, AfterValidator(_worker_url)]
ZmqEndpoint = Annotated[str, AfterValidator(_zmq_endpoint)]
HostPort = Annotated[str, AfterValidator(_host_port)]
ModelName = Annotated[str, Field(min_length=1)]
