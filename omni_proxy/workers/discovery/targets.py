"""Where workers may be that the config does not name: a source must not make the gateway ask anybody it likes.

Addresses that belong to one machine's link, to nobody or to many are never workers, and neither are those at which
clouds tell their secrets. `networks` narrows the rest down, or names such an address on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

Network = IPv4Network | IPv6Network

_SECRETIVE: Final = (
    ip_network("100.100.100.200/32"),
    ip_network("192.0.0.192/32"),
    ip_network("168.63.129.16/32"),
    ip_network("fd00:ec2::/32"),
)
"""Metadata services that are not link-local: Alibaba, Oracle, Azure, AWS over IPv6."""
_NAMES: Final = ("metadata", "metadata.google.internal", "instance-data", "metadata.azure.internal")


def why_not(host: str, networks: Sequence[Network] | None) -> str | None:
    """Why a host may be no worker; None: it may. `networks` None: any that is not refused in general."""
    address = _address(host)
    if address is None:
        if networks is not None:
            return f"{host} is a name, which may come to mean anything: with 'networks' hosts must be addresses"
        return f"{host} is a metadata service" if host.lower().rstrip(".") in _NAMES else None
    if networks is not None:
        return None if any(address in network for network in networks) else f"{host} is in none of 'networks'"
    if address.is_loopback:
        return None
    if address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved:
        return f"{host} is a link-local, multicast or reserved address"
    return f"{host} is a metadata service" if any(address in one for one in _SECRETIVE) else None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return _short_form(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _short_form(host: str) -> IPv4Address | None:
    """What the system's resolver takes for an address too: `2852039166`, `0xa9fea9fe`, `169.254.43518`."""
    parts = host.rstrip(".").split(".")
    try:
        numbers = [_number(part) for part in parts]
    except ValueError:
        return None
    if len(numbers) > 4 or any(n > 255 for n in numbers[:-1]) or numbers[-1] >= 256 ** (5 - len(numbers)):
        return None
    value = numbers[-1] + sum(n << (24 - 8 * place) for place, n in enumerate(numbers[:-1]))
    return IPv4Address(value)


def _number(text: str) -> int:
    if not text.isascii() or not text or text[0] not in "0123456789" or "_" in text:
        raise ValueError(text)
    if text[:2].lower() == "0x":
        return int(text, 16)
    return int(text, 8 if len(text) > 1 and text[0] == "0" else 10)
