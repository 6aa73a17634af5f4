"""The result of the published expert-parallel load balancer, the baseline to compare with; written anew from its rules.

Global: one more copy at a time to the expert with the most load per copy, then balanced packing: heaviest copy first
onto the lightest rank with a free slot. Hierarchical: expert groups packed onto nodes, copies inside each node, and
packing onto the node's ranks. Tokens split evenly, nothing is refined, and all ranks have the same slots in all layers.
"""

from __future__ import annotations

import numpy as np

from omni_proxy.workers.engine.placement.copies import replicate
from omni_proxy.workers.engine.placement.draft import scaled
from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.loads import Loads, checked
from omni_proxy.workers.engine.placement.packing import pack
from omni_proxy.workers.engine.placement.place import assemble, members_of_nodes
from omni_proxy.workers.engine.placement.plan import Placement
from omni_proxy.workers.engine.placement.topology import Topology


def public_placement(loads: Loads, topology: Topology, redundancy: int) -> Placement:
    """What the published algorithm yields; `redundancy` extra replicas per layer, which must fill all slots evenly."""
    loads = checked(loads)
    topology.check_experts(loads.shape[1])
    total = loads.shape[1] + redundancy
    if total % topology.ranks:
        raise PlacementError(
            Fault.REDUNDANCY_NOT_DIVISIBLE, f"{total} replicas do not divide over {topology.ranks} ranks"
        )
    members = members_of_nodes(loads, topology, refined=False)
    rows = np.take_along_axis(loads, members.reshape(len(loads), -1), axis=1).reshape(-1, members.shape[2])
    ranks, extras = topology.ranks_per_node, redundancy // topology.nodes
    weights = scaled(rows, ranks)
    copies = replicate(weights, extras, ranks).copies(np.full(len(weights), extras, np.int64))
    return assemble(pack(weights, copies, ranks, total // topology.ranks), members, topology.nodes)
