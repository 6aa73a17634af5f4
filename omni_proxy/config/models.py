"""The models that are served."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from omni_proxy.config.section import ModelName, Section
from omni_proxy.messages import Mode


class ScheduleMode(StrEnum):
    """`auto` picks per model what its workers can do."""

    AUTO = "auto"
    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    AGGREGATED = "aggregated"

    @property
    def mode(self) -> Mode | None:
        return None if self is ScheduleMode.AUTO else Mode(self.value)


class KvCachePolicy(StrEnum):
    """`apc`: prompts are tokenised and matched against what workers hold; `independent`: neither."""

    APC = "apc"
    INDEPENDENT = "independent"


class Model(Section):
    """The model's folder, for its tokenizer and chat template."""

    path: Path | None = None
    adapters: tuple[str, ...] = ()
    """Names under which LoRA adapters of it are served: their prompts share no KV with those of others."""
    send_token_ids: bool = False
    """Workers get token ids instead of text where their protocol has a place for them; the folder must be theirs."""


class Thinking(Section):
    """Requests in which the model thinks before it answers; the lengths of their answers are predicted apart."""

    default: bool = False
    """Does it think where a request says nothing about that?"""
    budget_tokens: dict[str, Annotated[int, Field(ge=0)]] = {}
    """`thinking_token_budget` for requests that name none, by `reasoning_effort`; `default` where there is none."""


class ServedModel(Model):
    """One of several models of a gateway, or other names of one."""

    name: ModelName
    """By which its workers are found."""
    aliases: tuple[ModelName, ...] = ()
    """Other names that clients may use; answers say what the client said."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    """Added to that of each request."""
    schedule_mode: ScheduleMode | None = None
    """None: as for all."""
    aggregate_below_tokens: Annotated[int, Field(ge=0)] | None = None
    """As in `scheduling`; None: as there."""
    thinking: Thinking = Thinking()
