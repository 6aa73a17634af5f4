"""What a host runs: each worker's command line and environment, and the gateway's config as a file. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from omni_proxy.deploy.engines import Engine, command, environment
from omni_proxy.deploy.recipe import Accelerator, Deployment, Placed

VISIBLE: Final[Mapping[Accelerator, str]] = {
    Accelerator.CUDA: "CUDA_VISIBLE_DEVICES",
    Accelerator.NPU: "ASCEND_RT_VISIBLE_DEVICES",
}
IMAGES: Final[Mapping[Engine, str]] = {
    Engine.EMBEDDED: "omni-proxy:latest",
    Engine.VLLM: "vllm/vllm-openai:latest",
    Engine.VLLM_ASCEND: "quay.io/ascend/vllm-ascend:latest",
    Engine.SGLANG: "lmsysorg/sglang:latest",
}


@dataclass(frozen=True, slots=True)
class Started:
    """A program with its arguments, and what is set in its environment."""

    line: tuple[str, ...]
    env: Mapping[str, str]


def started(worker: Placed) -> Started:
    """The worker on its own host, where it must be told which devices are its own."""
    seen = {VISIBLE[worker.accelerator]: ",".join(map(str, worker.devices))} if worker.devices else {}
    return Started(command(worker.launch), {**seen, **environment(worker.launch)})


def contained(worker: Placed) -> Started:
    """The worker in a container, which holds no devices but its own."""
    return Started(command(worker.launch), environment(worker.launch))


def paired(words: Sequence[str]) -> list[list[str]]:
    """A command line's words as people write them, a flag beside its value."""
    lines: list[list[str]] = []
    for word in words:
        if lines and len(lines[-1]) == 1 and lines[-1][0].startswith("-") and not word.startswith("-"):
            lines[-1].append(word)
        else:
            lines.append([word])
    return lines


def image(deployment: Deployment) -> str:
    """Of the workers' containers."""
    return deployment.recipe.images.engine or IMAGES[deployment.recipe.engine]


def stop_limit_s(deployment: Deployment) -> int:
    """How long the gateway may take to end: its drain, and then some."""
    return int(deployment.gateway.timeouts.drain_s) + 15


def shape(deployment: Deployment) -> str:
    """As people say it: 2P1D."""
    counts = [(letter, sum(w.launch.role.value == role for w in deployment.workers)) for role, letter in _LETTERS]
    return "".join(f"{count}{letter}" for letter, count in counts if count)


def head(deployment: Deployment, what: str) -> str:
    """The comment above a rendered file."""
    return f"# {deployment.recipe.name}, {shape(deployment)}: {what}. Made by `omni-proxy deploy render`.\n"


def gateway_yaml(deployment: Deployment) -> str:
    """The gateway's config."""
    return head(deployment, "the gateway's config") + dumped(deployment.gateway_data)


def dumped(data: Any) -> str:
    """YAML with keys in the order in which they were put."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes out what occurs twice; knows our tuples and enums."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(tuple, lambda dumper, data: dumper.represent_list(list(data)))
_LETTERS: Final = (("prefill", "P"), ("decode", "D"), ("mixed", "M"))
