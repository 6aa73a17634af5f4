"""The connectors that a config may name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_proxy.workers.connectors.aggregated import Aggregated
from omni_proxy.workers.connectors.ascend_layerwise import AscendLayerwise
from omni_proxy.workers.connectors.ascend_mooncake import AscendMooncake
from omni_proxy.workers.connectors.base import Connector
from omni_proxy.workers.connectors.lmcache import Lmcache
from omni_proxy.workers.connectors.omni import Omni
from omni_proxy.workers.connectors.omni_llmdatadist import OmniLlmDataDist
from omni_proxy.workers.connectors.sglang import Sglang
from omni_proxy.workers.connectors.vllm_mooncake import VllmMooncake
from omni_proxy.workers.connectors.vllm_nixl import VllmNixl
from omni_proxy.workers.connectors.vllm_p2p_nccl import VllmP2pNccl

CONNECTORS: Final[Mapping[str, Connector]] = {
    connector.name: connector
    for connector in (
        VllmNixl(),
        VllmMooncake(),
        VllmP2pNccl(),
        AscendMooncake(),
        AscendLayerwise(),
        OmniLlmDataDist(),
        Omni(),
        Sglang(),
        Lmcache(),
        Aggregated(),
    )
}
