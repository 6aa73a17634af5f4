"""What a recipe and a Ray plan say alike of engines and of workers, and the checks on it."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omni_proxy.config import ConnectorName, validated
from omni_proxy.config import Worker as WorkerConfig
from omni_proxy.deploy.engines import CONNECTORS, Engine, Launch, Shape, filled
from omni_proxy.messages import Role

EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One line: it becomes an argument or a value in files of many formats."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=40)]
"""Good for a unit, a container and a Kubernetes object."""
Count = Annotated[int, Field(ge=1, le=64)]

_OURS = frozenset({"name", "url", "role", "connector", "dp_size", "bootstrap_port", "kv_address"})


class Strict(BaseModel):
    """Frozen, and no key is unknown. Numbers will do for text: flags and variables are often such."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class PoolSettings(Strict):
    """How the workers of one role are started, and what the gateway's config says of them."""

    tensor_parallel: Count = 1
    data_parallel: Count = 1
    flags: tuple[Text, ...] = ()
    """Behind the engine's command line, as they are."""
    env: dict[EnvName, Text] = Field(default_factory=dict)
    command: tuple[Text, ...] = ()
    """Instead of the engine's: {name}, {role}, {model}, {host}, {address}, {port} and {kv_port} are filled in."""
    worker: dict[str, Any] = Field(default_factory=dict)
    """Fields for the entry in the gateway's config: `max_seqs`, `weight`, `models`, ..."""

    @property
    def shape(self) -> Shape:
        return Shape(self.tensor_parallel, self.data_parallel)

    @model_validator(mode="after")
    def _entry_is_valid(self) -> Self:
        if taken := sorted(_OURS & self.worker.keys()):
            raise ValueError(
                f"worker.{taken[0]}: is made from the rest, and cannot be set (got {self.worker[taken[0]]!r})"
            )
        entry = {"name": "x", "url": "http://127.0.0.1:1", "role": "mixed", **self.worker}
        try:
            validated(WorkerConfig, entry, "worker")
        except Exception as exc:
            raise ValueError(str(exc).splitlines()[0].replace("worker: ", "worker.", 1)) from exc
        return self

    @model_validator(mode="after")
    def _template_can_be_filled(self) -> Self:
        probe = Launch("n", 0, Role.MIXED, Engine.EMBEDDED, ConnectorName.OMNI, "m", None, "h", "a", 1, 2)
        for part in self.command:
            try:
                filled(part, probe)
            except ValueError as exc:
                raise ValueError(
                    "command: only {name}, {role}, {model}, {host}, {address}, {port} and {kv_port} can be filled in, "
                    f"and a brace that stands for itself is doubled (got {part!r})"
                ) from exc
        return self


class EngineSettings(Strict):
    """Which engine serves which model."""

    engine: Engine = Engine.EMBEDDED
    connector: ConnectorName | None = None
    """None: the engine's first in docs/engines.md."""
    model: Text | None = None
    """A folder or a name that the engine knows; None: the demo model, for the embedded engine only."""
    served_model_name: Text | None = None

    @property
    def speaks(self) -> ConnectorName:
        return self.connector or CONNECTORS[self.engine][0]

    @model_validator(mode="after")
    def _engine_knows_it(self) -> Self:
        known = CONNECTORS[self.engine]
        if self.connector is not None and self.connector not in known:
            names = ", ".join(name.value for name in known)
            raise ValueError(f"connector: the engine {self.engine.value} has {names} (got {self.connector.value!r})")
        if self.model is None and self.engine is not Engine.EMBEDDED:
            raise ValueError(f"model: is required for the engine {self.engine.value} (got None)")
        return self

    def check_pool(self, place: str, pool: PoolSettings, role: Role) -> None:
        """Raise ValueError for what this engine cannot do."""
        if self.engine is Engine.EMBEDDED and pool.shape != Shape() and not pool.command:
            raise ValueError(f"{place}: the embedded engine has one rank; set tensor_parallel and data_parallel to 1")
        needs_store = self.speaks is ConnectorName.LMCACHE and role is not Role.MIXED
        if needs_store and "LMCACHE_CONFIG_FILE" not in pool.env:
            raise ValueError(
                f"{place}.env: LMCACHE_CONFIG_FILE is required for the connector lmcache (got {pool.env!r})"
            )

    def connector_of(self, role: Role) -> ConnectorName:
        """What a worker of this role speaks: a mixed one hands no KV over, except the embedded engine's."""
        if role is Role.MIXED and self.engine is not Engine.EMBEDDED:
            return ConnectorName.AGGREGATED
        return self.speaks
