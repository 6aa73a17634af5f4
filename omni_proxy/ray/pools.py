"""What is wanted on the cluster: the pools file, and the plan that is made of it. Knows nothing of Ray itself."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from msgspec import Struct
from pydantic import Field, model_validator

from omni_proxy.config import ConfigError
from omni_proxy.deploy.engines import Engine, Launch
from omni_proxy.deploy.settings import EngineSettings, PoolSettings
from omni_proxy.messages import Role

ResourceName = Annotated[str, Field(min_length=1)]
Amount = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Strategy(StrEnum):
    """How Ray spreads workers over nodes."""

    SPREAD = "SPREAD"
    PACK = "PACK"
    STRICT_SPREAD = "STRICT_SPREAD"
    STRICT_PACK = "STRICT_PACK"


class RayPool(PoolSettings):
    """The workers of one role, and what each takes of its node."""

    count: Annotated[int, Field(ge=1, le=256)] = 1
    cpus: Amount = 1.0
    gpus: Amount | None = None
    """None: one for each rank of vLLM and SGLang where `resources` names no other devices, else none."""
    resources: dict[ResourceName, Amount] = Field(default_factory=dict)
    """Others that nodes of the cluster offer: `NPU: 8`, or names of your own."""
    accelerator: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """The kind of device, in Ray's words: `H100`, `A100-80G`."""
    start_limit_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """From its start until it must answer `/health`."""

    @model_validator(mode="after")
    def _resources_are_others(self) -> Self:
        if wrong := sorted({"CPU", "GPU", "memory"} & self.resources.keys()):
            raise ValueError(
                f"resources.{wrong[0]}: has a field of its own, or none (got {self.resources[wrong[0]]!r})"
            )
        return self

    def bundle(self, engine: Engine) -> dict[str, float]:
        """What one worker takes."""
        ranks = float(self.tensor_parallel * self.data_parallel)
        taken = {"CPU": self.cpus, **self.resources}
        if self.gpus is not None:
            taken["GPU"] = self.gpus
        elif engine is Engine.VLLM_ASCEND:
            taken.setdefault("NPU", ranks)
        elif engine is not Engine.EMBEDDED and not self.resources and not self.command:
            taken["GPU"] = ranks
        if self.accelerator is not None:
            taken[f"accelerator_type:{self.accelerator}"] = 0.001
        return {name: amount for name, amount in taken.items() if amount} or {"memory": 1.0}  # no bundle may be empty


class RayPools(EngineSettings):
    """The pools file of `omni-proxy up --ray ... --ray-pools FILE`."""

    strategy: Strategy = Strategy.SPREAD
    wait_s: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """For nodes to come that have room for all."""
    prefill: RayPool = RayPool()
    decode: RayPool = RayPool()

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        for role in (Role.PREFILL, Role.DECODE):
            self.check_pool(role.value, getattr(self, role.value), role)
        return self

    def with_counts(self, prefill: int | None, decode: int | None) -> RayPools:
        """Other numbers of workers, where they are given."""
        changed: dict[str, Any] = {}
        for name, count in (("prefill", prefill), ("decode", decode)):
            if count is not None:
                changed[name] = getattr(self, name).model_copy(update={"count": count})
        return self.model_copy(update=changed)


class Planned(Struct):
    """One worker: how it is started (where, is not known yet), what it takes, what its entry says besides."""

    launch: Launch
    bundle: dict[str, float]
    start_limit_s: float
    entry: dict[str, Any]


class Plan(Struct):
    """All workers, and the cluster on which they shall be. Sent to the process that places them."""

    address: str
    namespace: str
    strategy: str
    wait_s: float
    lease_s: float
    workers: list[Planned]


def planned(pools: RayPools) -> list[Planned]:
    """The workers of the pools, prefill first."""
    shapes = pools.prefill.shape, pools.decode.shape
    wanted = [(Role.PREFILL, pools.prefill, i) for i in range(pools.prefill.count)]
    wanted += [(Role.DECODE, pools.decode, i) for i in range(pools.decode.count)]
    return [
        Planned(
            Launch(
                f"{role.value}-{number}",
                index,
                role,
                pools.engine,
                pools.speaks,
                pools.model,
                pools.served_model_name,
                *("", "", 0, 0),
                pool.shape,
                *shapes,
                pool.flags,
                dict(pool.env),
                pool.command,
            ),
            pool.bundle(pools.engine),
            pool.start_limit_s,
            dict(pool.worker),
        )
        for index, (role, pool, number) in enumerate(wanted)
    ]


def check_address(address: str) -> str:
    """An address for Ray: auto, local, HOST:PORT or ray://HOST:PORT. Raises ConfigError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local") or (host and colon and port.isdigit() and 0 < int(port) < 65536):
        return address
    raise ConfigError(f"--ray: must be auto, local or HOST:PORT (got {address!r})")
