"""The connectors that a config may name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_proxy.workers.connectors.aggregated import Aggregated
from omni_proxy.workers.connectors.base import Connector
from omni_proxy.workers.connectors.omni import Omni
from omni_proxy.workers.connectors.sglang import Sglang
from omni_proxy.workers.connectors.vllm_nixl import VllmNixl

CONNECTORS: Final[Mapping[str, Connector]] = {
    connector.name: connector for connector in (VllmNixl(), Omni(), Sglang(), Aggregated())
}
