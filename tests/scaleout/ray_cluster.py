"""A Ray cluster of several node processes on this machine, in a process of its own.

Run as a script it starts a head without CPUs and the nodes that are asked for, and obeys lines on its standard input:
`add`, and `kill NODE_ID` for a node that dies at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

START_LIMIT_S = 120.0


def main(nodes: int) -> None:
    """Serve until standard input closes."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    # A dead node is found out after five seconds, not fifteen.
    found_out = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": found_out, **small})
    try:
        known = {}
        for _ in range(nodes):
            node = cluster.add_node(num_cpus=1, **small)
            known[node.node_id] = node
        sys.stdout.write(f"{cluster.address}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            what, _, which = line.strip().partition(" ")
            if what == "add":
                node = cluster.add_node(num_cpus=1, **small)
                known[node.node_id] = node
            else:
                node = next(n for name, n in known.items() if name.startswith(which))
                node.kill_raylet()
            sys.stdout.write("done\n")
            sys.stdout.flush()
    finally:
        cluster.shutdown()


class RayCluster:
    """A running one."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address

    async def add(self) -> None:
        """One more node."""
        await self._obeyed("add")

    async def kill(self, node: str) -> None:
        """End a node as if its power had failed, by the beginning of its id."""
        await self._obeyed(f"kill {node}")

    async def _obeyed(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(START_LIMIT_S):
            assert await self._process.stdout.readline() == b"done\n"


@contextlib.asynccontextmanager
async def ray_cluster(nodes: int) -> AsyncIterator[RayCluster]:
    """Nodes of one CPU each; gone when the context ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(nodes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_LIMIT_S):
            address = (await process.stdout.readline()).decode().strip()
        assert address, "the cluster did not start"
        yield RayCluster(process, address)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(60):
            await process.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
