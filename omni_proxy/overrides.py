"""What stands beside a config file: `OMNI_PROXY__SECTION__FIELD` of the environment, and files of secrets.

Works on the plain data of a config, before it is validated; `config` alone reads the environment and files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

PREFIX: Final = "OMNI_PROXY__"
FILE: Final = "file:"
MAX_SECRET_BYTES: Final = 64 << 10

Place = tuple[str | int, ...]
"""Keys and list indices from the top of a config down to a value."""


class Unusable(Exception):
    """A variable or a file that cannot be used; one line that names it."""


def overridden(data: Any, environment: Mapping[str, str]) -> tuple[Any, dict[Place, str]]:
    """The config with the environment's values in it, and the variable behind each place. Raises Unusable.

    Names are in upper case, one `__` between sections; values are YAML, so `OMNI_PROXY__WORKERS='[...]'` is a list.
    A number is a place in a list that is there: `OMNI_PROXY__WORKERS__0__URL`.
    """
    sources: dict[Place, str] = {}
    for name in sorted(environment):
        if name.startswith(PREFIX):
            steps = name.removeprefix(PREFIX).lower().split("__")
            place: Place = tuple(int(step) if step.isdigit() else step for step in steps)
            data = _put(data, place, _value(name, environment[name]), name)
            sources[place] = name
    return data, sources


def _value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise Unusable(f"{name}: is not YAML") from exc


def _put(data: Any, place: Place, value: Any, name: str) -> Any:
    """A copy of the data with one value changed."""
    if not place:
        return value
    step, rest = place[0], place[1:]
    if step == "":
        raise Unusable(f"{name}: names no field; it must be {PREFIX}SECTION__FIELD")
    if isinstance(step, int) and isinstance(data, list):
        if step >= len(data):
            raise Unusable(f"{name}: there are {len(data)} entries, so there is no number {step}")
        return [*data[:step], _put(data[step], rest, value, name), *data[step + 1 :]]
    if data is not None and not isinstance(data, dict):
        raise Unusable(f"{name}: {step!r} is looked for in what is no section")
    before = {} if data is None else data
    return {**before, str(step): _put(before.get(str(step)), rest, value, name)}


def with_secrets(data: Any, secret: Callable[[str], bool], place: str = "") -> Any:
    """The config with what secrets in files say (`token: file:/run/secrets/token`). Raises Unusable.

    `secret`: may the value of a field of this name lie in a file?
    """
    if isinstance(data, list):
        return [with_secrets(one, secret, f"{place}[{number}]") for number, one in enumerate(data)]
    if not isinstance(data, dict):
        return data
    found: dict[Any, Any] = {}
    for name, value in data.items():
        inner = f"{place}.{name}".lstrip(".")
        if not isinstance(name, str) or not secret(name):
            found[name] = with_secrets(value, secret, inner)
        elif isinstance(value, dict):
            found[name] = {key: _told(one, f"{inner}.{key}") for key, one in value.items()}
        else:
            found[name] = _told(value, inner)
    return found


def _told(value: Any, place: str) -> Any:
    if isinstance(value, str) and value.startswith(FILE):
        return _read(Path(value.removeprefix(FILE)), place)
    return value


def _read(path: Path, place: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SECRET_BYTES + 1)
        text = raw.decode().strip()
    except OSError as exc:
        raise Unusable(f"{place}: {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise Unusable(f"{place}: {path}: is not UTF-8 text") from exc
    if not text or len(raw) > MAX_SECRET_BYTES or "\n" in text:
        raise Unusable(f"{place}: {path}: must hold one line, the secret")
    return text
