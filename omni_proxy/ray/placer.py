"""The process that is Ray's driver: places workers on the cluster, watches them, starts lost ones again.

Apart from the gateway, because Ray ends its driver with the node it is attached to. Workers are detached from it, too:
who places them anew finds those that still run. They go when the gateway says so (it closes our standard input), or
when nobody has asked after them for their lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util import list_named_actors, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from omni_proxy.deploy.engines import command, environment, kv_ports, worker_entry
from omni_proxy.ray import guard, host
from omni_proxy.ray.pools import Plan, Planned
from omni_proxy.ray.wire import Fault, Lost, Message, Serving, Starting, Waiting

_REACH_S: Final = 5.0

BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_S: Final = 30.0
GROUP: Final = "workers"
_STOP_LIMIT_S: Final = 10.0
_TRIES: Final = 2
"""A first start that fails may have lost its port to somebody else; a second one has not."""


class Failed(Exception):
    """It makes no sense to go on."""


def main() -> int:
    """Read a plan from standard input; place it until that closes. Messages go to standard output."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever Ray prints is no message

    def tell(message: Message) -> None:
        with contextlib.suppress(BrokenPipeError):
            out.write(msgspec.json.encode(message) + b"\n")

    code = 0
    try:
        asyncio.run(_place(tell))
    except* Failed as failures:
        tell(Fault(str(failures.exceptions[0])))
        code = 1
    finally:
        ray.shutdown()
    return code


async def _place(tell: Callable[[Message], None]) -> None:
    said = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(said), sys.stdin)
    plan = msgspec.json.decode(await said.readline(), type=Plan)
    _connect(plan)
    closed = asyncio.create_task(said.read(), name="stdin")
    placer = Placer(plan, tell)
    placing = asyncio.create_task(placer.run(), name="placing")
    await asyncio.wait((closed, placing), return_when=asyncio.FIRST_COMPLETED)
    placing.cancel()
    try:
        await placing
    except asyncio.CancelledError:
        pass
    finally:
        closed.cancel()
        await placer.remove()


def _connect(plan: Plan) -> None:
    local = plan.address == "local"
    try:
        _reach(plan.address)
        ray.init(
            address=plan.address,
            namespace=plan.namespace,
            log_to_driver=False,
            logging_level="ERROR",
            **({"include_dashboard": False, "_node_ip_address": "127.0.0.1"} if local else {}),
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0]
        raise ExceptionGroup("", [Failed(f"no Ray cluster at {plan.address!r}: {reason}")]) from exc


def _reach(address: str) -> None:
    """Ray itself asks for a minute where nobody listens. Raises OSError."""
    host_name, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in address:
        socket.create_connection((host_name.strip("[]"), int(port)), timeout=_REACH_S).close()


class Placer:
    """The workers of one plan."""

    def __init__(self, plan: Plan, tell: Callable[[Message], None]) -> None:
        self._plan = plan
        self._tell = tell
        # A node needs Ray and the engine only: the actor's class travels with its code.
        cloudpickle.register_pickle_by_value(host)
        self._class = ray.remote(host.Host)
        self._guard = Path(guard.__file__).read_text(encoding="utf-8")
        self._actors: dict[str, Any] = {}
        self._group: PlacementGroup | None = None

    async def run(self) -> None:
        """Until cancelled. Raises Failed, in a group."""
        try:
            self._group = await self._placed()
        except Failed as exc:
            raise ExceptionGroup("placing", [exc]) from exc
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat(), name="beat")
            for number, worker in enumerate(self._plan.workers):
                tasks.create_task(self._keep(number, worker), name=f"keep {worker.launch.name}")

    async def remove(self) -> None:
        """Take everything off the cluster."""
        ends = [asyncio.wrap_future(actor.stop.remote().future()) for actor in self._actors.values()]
        if ends:
            await asyncio.wait(ends, timeout=_STOP_LIMIT_S)
            await asyncio.gather(*[end for end in ends if end.done()], return_exceptions=True)
        for actor in self._actors.values():
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)

    # ------------------------------------------------------------------ room

    async def _placed(self) -> PlacementGroup:
        """Room for all workers: that of an earlier run of this process, or new."""
        try:
            group = get_placement_group(GROUP)
        except ValueError:
            bundles = [worker.bundle for worker in self._plan.workers]
            group = placement_group(bundles, strategy=self._plan.strategy, name=GROUP, lifetime="detached")
        self._group = group
        loop = asyncio.get_running_loop()
        deadline, told = loop.time() + self._plan.wait_s, False
        while not await asyncio.to_thread(group.wait, 2):
            if loop.time() > deadline:
                raise Failed(f"no room after {self._plan.wait_s:g} s: {self._lacking()}")
            if not told:
                told = True
                self._tell(Waiting(self._lacking()))
        return group

    def _lacking(self) -> str:
        kinds: dict[str, int] = {}
        for worker in self._plan.workers:
            text = ", ".join(f"{amount:g} {name}" for name, amount in worker.bundle.items())
            kinds[text] = kinds.get(text, 0) + 1
        wanted = " and ".join(f"{count} x ({text})" for text, count in kinds.items())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        names = sorted({name for worker in self._plan.workers for name in worker.bundle})
        found = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in names) for node in nodes)
        return f"wanted {wanted} with strategy {self._plan.strategy}, the {len(nodes)} nodes have {found}"

    # --------------------------------------------------------------- workers

    async def _keep(self, number: int, worker: Planned) -> None:
        """One worker, life after life."""
        name, loop = worker.launch.name, asyncio.get_running_loop()
        generation, found = self._left_behind(name)
        failures, served, tries = 0, found is not None, 0
        while True:
            begun = loop.time()
            self._tell(Starting(name))
            if found is None:
                generation += 1
                found = self._create(number, worker, f"{name}.{generation}")
            self._actors[name] = found
            reason, began = await self._live(worker, found, begun)
            served, tries = served or began, tries + 1
            if not served and not isinstance(reason, _Died) and tries >= _TRIES:
                raise Failed(f"{name}: {reason}")
            self._tell(Lost(name, str(reason)))
            with contextlib.suppress(RayError, ValueError):
                ray.kill(found, no_restart=True)
            found = None
            failures = 0 if loop.time() - begun > STABLE_S else failures + 1
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] if failures else 0.0)

    async def _live(self, worker: Planned, actor: Any, begun: float) -> tuple[str, bool]:
        """One life: why it ended, and whether it served."""
        began = False
        try:
            ready = await actor.serving.remote()
            if ready is None:
                ready = await self._start(worker, actor)
            if "fault" in ready:
                return str(ready["fault"]), False
            began = True
            seconds = asyncio.get_running_loop().time() - begun
            self._tell(Serving(worker.launch.name, ready["entry"], ready["pid"], ready["node"], seconds))
            return await self._ended(actor), True
        except RayError as exc:
            return _Died(_short(exc)), began

    async def _start(self, worker: Planned, actor: Any) -> dict[str, Any]:
        launch = worker.launch
        address, (port, kv_port) = await actor.reserve.remote([1, kv_ports(launch.engine, launch.shape)])
        launch = replace(launch, listen=address, address=address, port=port, kv_port=kv_port)
        entry = {**worker_entry(launch), **worker.entry}
        line, env = list(command(launch)), environment(launch)
        ready: dict[str, Any] = await actor.start.remote(line, env, port, worker.start_limit_s, entry)
        return ready

    async def _ended(self, actor: Any) -> str:
        while True:
            try:
                return str(await actor.wait.remote())
            except ActorDiedError:
                raise
            except ActorUnavailableError:  # the way to it is broken; whether it is, Ray has not found out
                await asyncio.sleep(0.5)

    def _create(self, number: int, worker: Planned, name: str) -> Any:
        taken = dict(worker.bundle)
        return self._class.options(
            name=name,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=8,
            num_cpus=taken.pop("CPU", 0),
            num_gpus=taken.pop("GPU", 0),
            memory=taken.pop("memory", None),
            resources=taken,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number, placement_group_capture_child_tasks=False
            ),
        ).remote(self._guard, self._plan.lease_s)

    def _left_behind(self, name: str) -> tuple[int, Any]:
        """The last actor of this worker that an earlier run of this process has placed, and its number."""
        numbers = [int(n) for w, _, n in (known.rpartition(".") for known in list_named_actors()) if w == name]
        if not numbers:
            return 0, None
        try:
            return max(numbers), ray.get_actor(f"{name}.{max(numbers)}")
        except ValueError:
            return max(numbers), None

    async def _beat(self) -> None:
        while True:
            for actor in self._actors.values():
                with contextlib.suppress(RayError):
                    actor.beat.remote()
            await asyncio.sleep(self._plan.lease_s / 6)


class _Died(str):
    """The actor or its node is gone: no fault of the engine's."""

    __slots__ = ()


def _short(exc: RayError) -> str:
    text = " ".join(str(exc).split())
    if "node" in text and ("died" in text or "dead" in text or "terminated" in text):
        return "its node is gone"
    return text[:200]


if __name__ == "__main__":
    sys.exit(main())
