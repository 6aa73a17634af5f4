"""Renders manifests: a Deployment for each kind of worker, and the gateway that finds them by label. Pure.

Where pods run is the cluster's own to decide, except on hosts whose `node` the recipe names. Each pod has its own
address, so all listen on the same ports. Workers whose pods would be equal are replicas of one Deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from omni_proxy.config import ConfigError, ConnectorName
from omni_proxy.deploy.recipe import Accelerator, Deployment, Placed
from omni_proxy.deploy.started import contained, dumped, head, image, stop_limit_s

PORT: Final = 8000
KV_PORT: Final = 8998
_IP: Final = "\x00POD_IP\x00"
"""Stands for the pod's address until all other dollars are escaped."""
_RESOURCES: Final[Mapping[Accelerator, str]] = {
    Accelerator.CUDA: "nvidia.com/gpu",
    Accelerator.NPU: "huawei.com/Ascend910",
}
_MARKS: Final = ("connector", "models", "group", "weight", "dp_size", "max_seqs", "max_batch_tokens", "bootstrap_port")
"""What discovery reads of a pod besides role and port."""
_SILENT: Final = frozenset({"name", "url", "role"})


def render(deployment: Deployment) -> dict[str, str]:
    """One text with all manifests. Raises ConfigError for what pods cannot say of themselves."""
    documents = [*_workers(deployment), *_gateway(deployment)]
    text = "---\n".join(dumped(document) for document in documents)
    return {f"{deployment.recipe.name}.yaml": head(deployment, "manifests for Kubernetes") + text}


# ------------------------------------------------------------------------------------- workers


def _workers(deployment: Deployment) -> list[dict[str, Any]]:
    groups: list[tuple[str, dict[str, Any], int]] = []
    for worker in deployment.workers:
        template = _template(deployment, worker)
        role = worker.launch.role.value
        same = next((i for i, (r, t, _) in enumerate(groups) if (r, t) == (role, template)), None)
        if same is None:
            groups.append((role, template, 1))
        else:
            groups[same] = (role, template, groups[same][2] + 1)
    roles = [role for role, _, _ in groups]
    seen: dict[str, int] = {}
    made = []
    for role, template, replicas in groups:
        number = seen[role] = seen.get(role, -1) + 1
        suffix = f"{role}-{number}" if roles.count(role) > 1 else role
        made.append(_deployment(f"{deployment.recipe.name}-{suffix}", template, replicas))
    return made


def _deployment(name: str, template: dict[str, Any], replicas: int) -> dict[str, Any]:
    labels = {**template["metadata"]["labels"], "app.kubernetes.io/component": name}
    metadata = {**template["metadata"], "labels": labels}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app.kubernetes.io/component": name}},
            "template": {**template, "metadata": metadata},
        },
    }


def _template(deployment: Deployment, worker: Placed) -> dict[str, Any]:
    launch = replace(worker.launch, name="worker", listen="0.0.0.0", address=_IP, port=PORT, kv_port=KV_PORT)
    program = contained(replace(worker, launch=launch))
    container: dict[str, Any] = {
        "name": "engine",
        "image": image(deployment),
        "command": [_expanded(word) for word in program.line],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": _expanded(value)} for name, value in program.env.items()),
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if worker.devices:
        container["resources"] = {"limits": {_RESOURCES[worker.accelerator]: str(len(worker.devices))}}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if launch.model is not None and launch.model.startswith("/"):
        container["volumeMounts"].append({"name": "model", "mountPath": launch.model, "readOnly": True})
        volumes.append({"name": "model", "hostPath": {"path": launch.model, "type": "Directory"}})
    spec: dict[str, Any] = {"terminationGracePeriodSeconds": 600, "containers": [container], "volumes": volumes}
    node = deployment.recipe.hosts[worker.host].node
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    labels = {"omni-proxy.io/deployment": deployment.recipe.name}
    return {"metadata": {"labels": labels, "annotations": _annotations(worker)}, "spec": spec}


def _annotations(worker: Placed) -> dict[str, str]:
    role = worker.launch.role.value
    if worker.launch.connector is ConnectorName.VLLM_P2P_NCCL:
        raise ConfigError("connector: pods cannot say their kv_address, let workers announce it (got 'vllm-p2p-nccl')")
    entry = {**worker.entry, **({"bootstrap_port": KV_PORT} if "bootstrap_port" in worker.entry else {})}
    for field, value in entry.items():
        if field not in _MARKS and field not in _SILENT:
            raise ConfigError(f"{role}.worker.{field}: pods cannot say it of themselves (got {value!r})")
    marks = {field.replace("_", "-"): _mark(role, field, entry[field]) for field in _MARKS if field in entry}
    return {f"omni-proxy.io/{key}": value for key, value in {"role": role, "port": str(PORT), **marks}.items()}


def _mark(role: str, field: str, value: Any) -> str:
    if field == "models" and not isinstance(value, list | tuple):
        raise ConfigError(f"{role}.worker.models: pods can only list names (got {value!r})")
    return ",".join(value) if field == "models" else str(value)


def _expanded(text: str) -> str:
    """`$(NAME)` is a variable to Kubernetes; no other dollar is."""
    return text.replace("$(", "$$(").replace(_IP, "$(POD_IP)")


# ------------------------------------------------------------------------------------- gateway


def _gateway(deployment: Deployment) -> list[dict[str, Any]]:
    recipe = deployment.recipe
    name, namespace = f"{recipe.name}-gateway", recipe.kubernetes.namespace
    labels = {"app.kubernetes.io/component": name}
    account: dict[str, Any] = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    role: dict[str, Any] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    }
    binding: dict[str, Any] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    config_map: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"config.yaml": dumped(gateway_data(deployment))},
    }
    service: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }
    return [account, role, binding, config_map, _gateway_deployment(deployment, name, labels), service]


def _gateway_deployment(deployment: Deployment, name: str, labels: dict[str, str]) -> dict[str, Any]:
    recipe = deployment.recipe
    container: dict[str, Any] = {
        "name": "gateway",
        "image": recipe.images.gateway,
        "command": ["omni-proxy", "serve", "-c", "/etc/omni-proxy/config.yaml"],
        "ports": [{"name": "http", "containerPort": deployment.gateway.listen.port}],
        "startupProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": {"httpGet": {"path": "/health", "port": "http"}},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 2},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/omni-proxy", "readOnly": True}],
    }
    if recipe.gateway.env:
        container["env"] = [{"name": n, "value": _expanded(value)} for n, value in recipe.gateway.env.items()]
    spec = {
        "serviceAccountName": name,
        "terminationGracePeriodSeconds": stop_limit_s(deployment),
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001},
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def gateway_data(deployment: Deployment) -> dict[str, Any]:
    """The gateway's config within the cluster: it finds its workers, and listens to the whole pod network."""
    data = {key: value for key, value in deployment.gateway_data.items() if key != "workers"}
    data["listen"] = {**data["listen"], "host": "0.0.0.0"}
    selector = f"omni-proxy.io/deployment={deployment.recipe.name}"
    namespace = deployment.recipe.kubernetes.namespace
    data["discovery"] = {"kubernetes": {"namespace": namespace, "selector": selector}}
    return data
