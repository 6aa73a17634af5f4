"""Renders a compose file for each host, on the host's own network. Pure."""

from __future__ import annotations

from typing import Any

from omni_proxy.deploy.recipe import Accelerator, Deployment, Placed
from omni_proxy.deploy.started import contained, dumped, gateway_yaml, head, image, stop_limit_s

_NPU_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_NPU_VOLUMES = (
    "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro",
    "/usr/local/dcmi:/usr/local/dcmi:ro",
    "/usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro",
    "/etc/ascend_install.info:/etc/ascend_install.info:ro",
)
_CONFIG = "/etc/omni-proxy/gateway.yaml"


def render(deployment: Deployment) -> dict[str, str]:
    """Texts by path."""
    files = {}
    for host in deployment.hosts():
        services = {worker.launch.name: _worker(deployment, worker) for worker in deployment.on(host)}
        if host == deployment.recipe.gateway.host:
            services["gateway"] = _gateway(deployment)
            files[f"{host}/gateway.yaml"] = gateway_yaml(deployment)
        project = {"name": deployment.recipe.name, "services": services}
        files[f"{host}/compose.yaml"] = head(deployment, f"what runs on {host}") + dumped(project)
    return files


def _worker(deployment: Deployment, worker: Placed) -> dict[str, Any]:
    program = contained(worker)
    service: dict[str, Any] = {
        **_common(image(deployment), program.env),
        "ipc": "host",
        "entrypoint": [_plain(word) for word in program.line],
        "command": [],
    }
    volumes = []
    model = worker.launch.model
    if model is not None and model.startswith("/"):
        volumes.append(_plain(f"{model}:{model}:ro"))
    if worker.devices and worker.accelerator is Accelerator.CUDA:
        ids = [str(device) for device in worker.devices]
        wanted = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [wanted]}}}
    elif worker.devices:
        service["devices"] = [*(f"/dev/davinci{device}" for device in worker.devices), *_NPU_DEVICES]
        volumes += _NPU_VOLUMES
    return {**service, "volumes": volumes} if volumes else service


def _gateway(deployment: Deployment) -> dict[str, Any]:
    return {
        **_common(deployment.recipe.images.gateway, deployment.recipe.gateway.env),
        "entrypoint": ["omni-proxy", "serve", "-c", _CONFIG],
        "command": [],
        "volumes": [f"./gateway.yaml:{_CONFIG}:ro"],
        "stop_grace_period": f"{stop_limit_s(deployment)}s",
    }


def _common(of: str, env: Any) -> dict[str, Any]:
    service: dict[str, Any] = {"image": of, "network_mode": "host", "restart": "always"}
    if env:
        service["environment"] = {name: _plain(value) for name, value in env.items()}
    return service


def _plain(text: str) -> str:
    """A dollar that begins no variable."""
    return text.replace("$", "$$")
