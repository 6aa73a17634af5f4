"""A recipe: which workers run on which machines, and the gateway before them. Knows no format to render to.

`load_recipe` reads and checks one; `Deployment` is what it says with every default filled in.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator

from omni_proxy.config import Config, ConfigError, parse, read_yaml, validated
from omni_proxy.deploy.engines import Engine, Launch, kv_ports, worker_entry
from omni_proxy.deploy.settings import Count, EngineSettings, EnvName, Name, PoolSettings, Strict, Text
from omni_proxy.messages import Role

FIRST_PORT: Final = 8100
FIRST_KV_PORT: Final = 15600
ROLES: Final = (Role.PREFILL, Role.DECODE, Role.MIXED)
_HOST_NAME: Final = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$")


class Accelerator(StrEnum):
    """What a host's devices are."""

    CUDA = "cuda"
    NPU = "npu"


def _address(address: str) -> str:
    try:
        ipaddress.ip_address(address)
    except ValueError as exc:
        if not _HOST_NAME.match(address) or address.replace(".", "").isdigit():
            raise ValueError("must be an IP address or the name of a host, without scheme or port") from exc
    return address


Address = Annotated[str, AfterValidator(_address)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Host(Strict):
    """One machine."""

    address: Address
    """By which the gateway and other workers reach it."""
    devices: Annotated[int, Field(ge=0, le=1024)] = 0
    accelerator: Accelerator | None = None
    """None: NPUs for vLLM-Ascend, else CUDA devices."""
    node: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")] | None = None
    """The node's name in Kubernetes; workers are then held to it."""


class Place(Strict):
    """Where workers of a pool run."""

    host: str
    count: Count = 1
    devices: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """By number; None: the host's next free ones, one for each rank. Only for one worker."""
    port: Port | None = None
    """Of the first worker, the others count on; None: the host's next free one from 8100 on."""
    kv_port: Port | None = None
    """Likewise, from 15600 on: the first of those that the connector listens on."""
    flags: tuple[Text, ...] = ()
    env: dict[EnvName, Text] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _devices_are_one_workers(self) -> Self:
        if self.devices is not None and self.count > 1:
            raise ValueError(f"devices: names those of one worker, not of {self.count} (got {list(self.devices)!r})")
        return self


class RecipePool(PoolSettings):
    """The workers of one role."""

    at: Annotated[tuple[Place, ...], Field(min_length=1)]


class GatewayPart(Strict):
    """The gateway, and what its config says besides workers."""

    host: str
    config: dict[str, Any] = Field(default_factory=dict)
    env: dict[EnvName, Text] = Field(default_factory=dict)


class Images(Strict):
    """For compose and Kubernetes."""

    engine: Text | None = None
    """None: what the engine's project publishes."""
    gateway: Text = "omni-proxy:latest"


class KubernetesPart(Strict):
    """For Kubernetes."""

    namespace: Name = "default"


class Recipe(EngineSettings):
    """What an operator writes."""

    name: Name
    hosts: Annotated[dict[Name, Host], Field(min_length=1)]
    prefill: RecipePool | None = None
    decode: RecipePool | None = None
    mixed: RecipePool | None = None
    gateway: GatewayPart
    images: Images = Images()
    kubernetes: KubernetesPart = KubernetesPart()

    @model_validator(mode="after")
    def _roles_go_together(self) -> Self:
        if (self.prefill is None) != (self.decode is None):
            there, lacks = ("prefill", "decode") if self.decode is None else ("decode", "prefill")
            raise ValueError(f"{lacks}: is required where there is {there!r} (got None)")
        if self.prefill is None and self.mixed is None:
            raise ValueError("prefill: is required, with decode, or mixed (got None)")
        for role, pool in self.pools():
            self.check_pool(role.value, pool, role)
        return self

    @model_validator(mode="after")
    def _hosts_are_known(self) -> Self:
        named = [(f"{role.value}.at[{i}].host", p.host) for role, pool in self.pools() for i, p in enumerate(pool.at)]
        for place, wanted in [*named, ("gateway.host", self.gateway.host)]:
            if wanted not in self.hosts:
                raise ValueError(f"{place}: there is no host of that name (got {wanted!r})")
        addresses = [host.address for host in self.hosts.values()]
        for name, host in self.hosts.items():
            if addresses.count(host.address) > 1:
                raise ValueError(f"hosts.{name}.address: belongs to two hosts (got {host.address!r})")
        return self

    @model_validator(mode="after")
    def _config_leaves_workers_out(self) -> Self:
        for key in ("workers", "discovery"):
            if key in self.gateway.config:
                raise ValueError(f"gateway.config.{key}: is made from the recipe, and cannot be set")
        return self

    def pools(self) -> Iterator[tuple[Role, RecipePool]]:
        """Those that there are."""
        for role in ROLES:
            pool = getattr(self, role.value)
            if pool is not None:
                yield role, pool

    def accelerator(self, host: str) -> Accelerator:
        """What a host's devices are."""
        usual = Accelerator.NPU if self.engine is Engine.VLLM_ASCEND else Accelerator.CUDA
        return self.hosts[host].accelerator or usual


@dataclass(frozen=True, slots=True)
class Placed:
    """One worker, on its host, with its devices."""

    launch: Launch
    host: str
    devices: tuple[int, ...]
    accelerator: Accelerator
    entry: Mapping[str, Any]
    """Of the gateway's config."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A recipe with every default filled in."""

    recipe: Recipe
    workers: tuple[Placed, ...]
    gateway: Config
    gateway_data: Mapping[str, Any]
    """The gateway's config as it is written."""

    def hosts(self) -> list[str]:
        """Those on which something runs, in the recipe's order."""
        used = {worker.host for worker in self.workers} | {self.recipe.gateway.host}
        return [name for name in self.recipe.hosts if name in used]

    def on(self, host: str) -> list[Placed]:
        """The workers of a host."""
        return [worker for worker in self.workers if worker.host == host]


def load_recipe(path: Path) -> Deployment:
    """Read and check a recipe. Raises ConfigError, one line for each fault."""
    return deployment(read_yaml(path) or {}, str(path))


def deployment(data: Any, source: str) -> Deployment:
    """Check a recipe and fill its defaults in. `source` stands in front of each fault. Raises ConfigError."""
    recipe = validated(Recipe, data, source)
    workers = tuple(_Placing(recipe, source).workers())
    config = {"listen": {"host": "127.0.0.1", "port": 8000}, **recipe.gateway.config}
    config["workers"] = [dict(worker.entry) for worker in workers]
    return Deployment(recipe, workers, parse(config, f"{source}: gateway.config"), config)


class _Placing:
    """Gives out ports and devices, host by host."""

    def __init__(self, recipe: Recipe, source: str) -> None:
        self._recipe = recipe
        self._source = source
        self._ports: dict[str, dict[int, str]] = {host: {} for host in recipe.hosts}
        self._devices: dict[str, dict[int, str]] = {host: {} for host in recipe.hosts}
        listen = recipe.gateway.config.get("listen")
        port = listen.get("port", 8000) if isinstance(listen, dict) else 8000
        if isinstance(port, int):
            self._ports[recipe.gateway.host][port] = "gateway"

    def workers(self) -> Iterator[Placed]:
        """All of them, prefill first. What is named goes before what is chosen. Raises ConfigError."""
        self._hold_named()
        index = 0
        for role, pool in self._recipe.pools():
            number = 0
            for spot, place in enumerate(pool.at):
                for copy in range(place.count):
                    where = f"{role.value}.at[{spot}]"
                    yield self._worker(role, pool, place, (index, number, copy), where)
                    index, number = index + 1, number + 1

    def _worker(self, role: Role, pool: RecipePool, place: Place, numbers: tuple[int, int, int], where: str) -> Placed:
        recipe = self._recipe
        index, number, copy = numbers
        need = kv_ports(recipe.engine, pool.shape)
        address = recipe.hosts[place.host].address
        launch = Launch(
            f"{role.value}-{number}",
            index,
            role,
            recipe.engine,
            recipe.connector_of(role),
            recipe.model,
            recipe.served_model_name,
            address,
            address,
            place.port + copy if place.port is not None else self._free(place.host, FIRST_PORT, 1, where),
            place.kv_port + copy * need
            if place.kv_port is not None
            else self._free(place.host, FIRST_KV_PORT, need, where),
            pool.shape,
            recipe.prefill.shape if recipe.prefill else pool.shape,
            recipe.decode.shape if recipe.decode else pool.shape,
            (*pool.flags, *place.flags),
            {**pool.env, **place.env},
            pool.command,
        )
        entry = {**worker_entry(launch), **pool.worker}
        devices = place.devices if place.devices is not None else self._next_devices(place, pool, where)
        return Placed(launch, place.host, devices, recipe.accelerator(place.host), entry)

    # ----------------------------------------------------------------- named ones

    def _hold_named(self) -> None:
        for role, pool in self._recipe.pools():
            for spot, place in enumerate(pool.at):
                where = f"{role.value}.at[{spot}]"
                need = kv_ports(self._recipe.engine, pool.shape)
                if place.port is not None:
                    self._hold(place.host, place.port, place.count, f"{where}.port", place.port)
                if place.kv_port is not None:
                    self._hold(place.host, place.kv_port, place.count * need, f"{where}.kv_port", place.kv_port)
                self._hold_devices(place, pool, where)

    def _hold(self, host: str, first: int, count: int, where: str, got: int) -> None:
        for port in range(first, first + count):
            if port > 65535:
                raise self._fault(f"{where}: there are no {count} ports from there on (got {got})")
            if port in self._ports[host]:
                raise self._fault(f"{where}: port {port} of {host} belongs to {self._ports[host][port]} (got {got})")
            self._ports[host][port] = where

    def _hold_devices(self, place: Place, pool: RecipePool, where: str) -> None:
        there, ranks = self._recipe.hosts[place.host].devices, pool.tensor_parallel * pool.data_parallel
        for device in place.devices or ():
            if device >= there:
                raise self._fault(f"{where}.devices: {place.host} has {there} devices, counted from 0 (got {device})")
            if device in self._devices[place.host]:
                owner = self._devices[place.host][device]
                raise self._fault(f"{where}.devices: device {device} of {place.host} belongs to {owner} (got {device})")
            self._devices[place.host][device] = where
        if place.devices and not pool.command and len(place.devices) != ranks:
            shape = f"tensor_parallel {pool.tensor_parallel} x data_parallel {pool.data_parallel}"
            raise self._fault(f"{where}.devices: {shape} needs {ranks} devices (got {list(place.devices)!r})")

    # ---------------------------------------------------------------- chosen ones

    def _free(self, host: str, first: int, count: int, where: str) -> int:
        taken = self._ports[host]
        while any(port in taken for port in range(first, first + count)):
            first += 1
        self._hold(host, first, count, where, first)
        return first

    def _next_devices(self, place: Place, pool: RecipePool, where: str) -> tuple[int, ...]:
        if self._recipe.engine is Engine.EMBEDDED:
            return ()
        there, need = self._recipe.hosts[place.host].devices, pool.tensor_parallel * pool.data_parallel
        free = [device for device in range(there) if device not in self._devices[place.host]]
        if len(free) < need:
            raise self._fault(
                f"{where}: a worker needs {need} devices, and {place.host} has {len(free)} of {there} left "
                f"(got {place.host!r})"
            )
        for device in free[:need]:
            self._devices[place.host][device] = where
        return tuple(free[:need])

    def _fault(self, text: str) -> ConfigError:
        return ConfigError(f"{self._source}: {text}")
