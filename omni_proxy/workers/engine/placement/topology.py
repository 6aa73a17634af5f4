"""Ranks, nodes and expert groups. Knows how they divide, not what is on them."""

from __future__ import annotations

from dataclasses import dataclass

from omni_proxy.workers.engine.placement.errors import Fault, PlacementError


@dataclass(frozen=True, slots=True)
class Topology:
    """`ranks` devices on `nodes` machines; experts come in `groups` that stay on one node when `nodes` > 1.

    One node means the global policy: any expert may go to any rank. Several mean the hierarchical one, for routers
    that are limited to groups (a token then stays on few nodes).
    """

    ranks: int
    nodes: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.ranks, self.nodes, self.groups) < 1:
            raise PlacementError(Fault.BAD_OPTION, "ranks, nodes and groups must be at least 1")
        if self.ranks % self.nodes:
            raise PlacementError(Fault.RANKS_NOT_DIVISIBLE, f"{self.ranks} ranks do not divide over {self.nodes} nodes")
        if self.nodes > 1 and self.groups % self.nodes:
            raise PlacementError(
                Fault.GROUPS_NOT_DIVISIBLE, f"{self.groups} expert groups do not divide over {self.nodes} nodes"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    def check_experts(self, experts: int) -> None:
        """Raise when `experts` do not divide into the groups."""
        if self.nodes > 1 and experts % self.groups:
            raise PlacementError(
                Fault.GROUPS_NOT_DIVISIBLE, f"{experts} experts do not divide into {self.groups} groups"
            )
