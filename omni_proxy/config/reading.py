"""Reads configs from files and the environment; every error names its place in the file and the value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from omni_proxy.config.whole import Config
from omni_proxy.overrides import Place, Unusable, overridden, with_secrets

AnyModel = TypeVar("AnyModel", bound=BaseModel)


class ConfigError(Exception):
    """One or more faults in a config; each line names the file, the place in it and the value."""


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Read and validate a YAML config, with what the environment and files of secrets say.

    Raises ConfigError, one line for each fault.
    """
    data = read_yaml(path)
    try:
        data, variables = overridden({} if data is None else data, environment)
        data = with_secrets(_with_tenants(data), SECRETS.__contains__)
    except Unusable as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    return parse(data, str(path), variables)


def _with_tenants(data: Any) -> Any:
    """With the tenants that stand in a file of their own."""
    access = data.get("access") if isinstance(data, dict) else None
    if not isinstance(access, dict) or not isinstance(access.get("tenants_file"), str):
        return data
    named = access["tenants_file"]
    here = access.get("tenants") or {}
    found = read_yaml(Path(named))
    if not isinstance(found, dict) or set(found) != {"tenants"} or not isinstance(found["tenants"], dict):
        raise Unusable(f"access.tenants_file: {named}: must hold 'tenants:' with names below, and nothing else")
    doubled = sorted(map(str, set(here) & set(found["tenants"])))
    if doubled:
        raise Unusable(f"access.tenants_file: {named}: the config has a tenant {doubled[0]}, too")
    return {**data, "access": {**access, "tenants": {**here, **found["tenants"]}}}


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; None: nothing. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 text") from exc
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {_yaml_fault(exc)}") from exc
    except (ValueError, RecursionError) as exc:  # dates and numbers that there are not, lists without end
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc


def parse(data: Any, source: str, variables: Mapping[Place, str] = {}) -> Config:
    """Validate what a config file holds. `source` stands in front of each fault, or one of the variables."""
    return validated(Config, data, source, variables)


def validated(model: type[AnyModel], data: Any, source: str, variables: Mapping[Place, str] = {}) -> AnyModel:
    """Validate what a file of some kind holds. Raises ConfigError, one line for each fault, as for a config."""
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping, not {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        faults = [_fault(_origin(source, variables, e["loc"]), e["loc"], e["msg"], e["input"]) for e in exc.errors()]
        raise ConfigError("\n".join(faults)) from exc


def _origin(source: str, variables: Mapping[Place, str], loc: Place) -> str:
    """The file, or the variable from which the value came."""
    return next((name for place, name in variables.items() if loc[: len(place)] == place), source)


SECRETS: Final = frozenset({"api_key", "token", "tokens", "keys", "redis"})
"""Fields whose values are told to nobody, not even where they are wrong."""


def _fault(source: str, loc: tuple[int | str, ...], message: str, value: Any) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    secret = not SECRETS.isdisjoint(loc)
    shown = "" if isinstance(value, dict | list | tuple) or not place or secret else f" (got {value!r})"
    return f"{source}: {place + ': ' if place else ''}{message.removeprefix('Value error, ')}{shown}"


def _yaml_fault(exc: yaml.YAMLError) -> str:
    mark = getattr(exc, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{getattr(exc, 'problem', None) or 'is not YAML'}"
