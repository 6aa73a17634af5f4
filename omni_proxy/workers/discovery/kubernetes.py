"""Pods by label selector, from the Kubernetes API: one list, then a watch from there on.

A watch that breaks is taken up where it broke; where the server has forgotten that (410 Gone) all are listed anew.
Bookmarks move that place on while nothing happens. A pod that terminates drains; one that is not ready is not there.
What a pod is stands in its annotations under `omni-proxy.io/`: role, port, connector, models, group, weight, dp-size,
max-seqs, max-batch-tokens, bootstrap-port.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from omni_proxy.workers.discovery.vetting import Candidate, url_of

PREFIX: Final = "omni-proxy.io/"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_RETRY_S: Final = 0.5
_MOST_RETRY_S: Final = 10.0
_PAGE: Final = 500


class _Gone(Exception):
    """The server has forgotten the place from which to go on."""


class PodSource:
    """Follows the pods of one namespace. `token` is read again for each request, because it is renewed in its file."""

    resource = "/api/v1/namespaces/{}/pods"

    def __init__(
        self,
        client: httpx.AsyncClient,
        namespace: str,
        selector: str,
        token: Callable[[], str | None] = lambda: None,
        watch_s: int = 300,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.name = "kubernetes"
        self._client = client
        self._path = self.resource.format(namespace)
        self._selector = selector
        self._token = token
        self._watch_s = watch_s
        self._retry_s = retry_s
        self._pods: dict[str, Mapping[str, Any]] = {}
        self._version = ""
        self.lists = 0
        """How often everything was listed."""

    async def run(self, found: Callable[[Sequence[Candidate]], None], failed: Callable[[str], None]) -> None:
        """Until cancelled."""
        wait_s = self._retry_s
        while True:
            try:
                if not self._version:
                    await self._list()
                    found(self.candidates())
                async for _ in self._watch():
                    wait_s = self._retry_s
                    found(self.candidates())
                continue  # it ended in order: go on from there
            except _Gone:
                self._version = ""
            except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as exc:
                failed(f"{type(exc).__name__}: {exc}"[:200])
            await asyncio.sleep(wait_s)
            wait_s = min(_MOST_RETRY_S, 2 * wait_s)

    def candidates(self) -> list[Candidate]:
        """The pods that are there, as workers."""
        return [one for _, item in sorted(self._pods.items()) for one in self.workers_of(item)]

    def workers_of(self, item: Mapping[str, Any]) -> list[Candidate]:
        """What one object of the API stands for."""
        one = candidate(item)
        return [] if one is None else [one]

    async def _list(self) -> None:
        pods: dict[str, Mapping[str, Any]] = {}
        query = {"labelSelector": self._selector, "limit": str(_PAGE)}
        while True:
            answer = await self._client.get(self._path, params=query, headers=self._headers())
            if answer.status_code == 410:
                raise _Gone
            answer.raise_for_status()
            body = answer.json()
            pods.update((_uid(pod), pod) for pod in body["items"])
            more = body["metadata"].get("continue")
            if not more:
                break
            query["continue"] = more
        self._pods, self._version = pods, body["metadata"]["resourceVersion"]
        self.lists += 1

    async def _watch(self) -> Any:
        """Yields after each change; ends when the server ends the watch."""
        query = {
            **{"labelSelector": self._selector, "watch": "1", "allowWatchBookmarks": "true"},
            **{"resourceVersion": self._version, "timeoutSeconds": str(self._watch_s)},
        }
        timeout = httpx.Timeout(10.0, read=self._watch_s + 30.0)
        async with self._client.stream(
            "GET", self._path, params=query, headers=self._headers(), timeout=timeout
        ) as answer:
            if answer.status_code == 410:
                raise _Gone
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line and self._changed(json.loads(line)):
                    yield None

    def _changed(self, event: Mapping[str, Any]) -> bool:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == 410:
                raise _Gone
            raise ValueError(f"the watch says: {item.get('message')}")
        self._version = item["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return False
        if kind == "DELETED":
            self._pods.pop(_uid(item), None)
        else:
            self._pods[_uid(item)] = item
        return True

    def _headers(self) -> dict[str, str]:
        token = self._token()
        return {} if token is None else {"authorization": f"Bearer {token}"}


def candidate(pod: Mapping[str, Any]) -> Candidate | None:
    """A pod as a worker; None while it has no address, or is not ready and does not terminate either."""
    meta, status = pod["metadata"], pod.get("status", {})
    address = status.get("podIP")
    ends = meta.get("deletionTimestamp") is not None
    if not address or status.get("phase") in ("Succeeded", "Failed") or not (ends or _ready(status)):
        return None
    marks = _marks(meta)
    port = marks.get("port", "8000")
    return _worker(marks, meta["name"], address, port, ends)


def endpoints(slice_: Mapping[str, Any]) -> list[Candidate]:
    """The endpoints of a slice as workers: their ports are the slice's, what they are stands in its labels."""
    marks = _marks(slice_["metadata"])
    ports = [one.get("port") for one in slice_.get("ports") or () if one.get("port")]
    port = marks.get("port") or str(ports[0] if ports else 8000)
    found = []
    for endpoint in slice_.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        ends = bool(conditions.get("terminating"))
        addresses = endpoint.get("addresses") or ()
        if addresses and (ends or conditions.get("ready") is not False):  # unknown counts as ready, by the API's rules
            name = (endpoint.get("targetRef") or {}).get("name") or re.sub(r"[^A-Za-z0-9.]+", "-", addresses[0])
            found.append(_worker(marks, name.strip("-"), addresses[0], port, ends))
    return found


class SliceSource(PodSource):
    """Follows the EndpointSlices of a service: its readiness rules, also for workers outside the cluster."""

    resource = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"

    def workers_of(self, item: Mapping[str, Any]) -> list[Candidate]:
        return endpoints(item)


def _marks(meta: Mapping[str, Any]) -> dict[str, str]:
    said = {**(meta.get("labels") or {}), **(meta.get("annotations") or {})}
    return {key.removeprefix(PREFIX): value for key, value in said.items() if key.startswith(PREFIX)}


def _worker(marks: Mapping[str, str], name: str, address: str, port: str, ends: bool) -> Candidate:
    found: dict[str, object] = {
        "name": name,
        "url": url_of(address, int(port)) if port.isdigit() else f"http://{address}:{port}",
        "role": marks.get("role"),
    }
    for name in ("connector", "group", "weight", "dp-size", "max-seqs", "max-batch-tokens", "bootstrap-port"):
        if name in marks:
            found[name.replace("-", "_")] = marks[name]
    if "models" in marks:
        found["models"] = [model.strip() for model in marks["models"].split(",")]
    if ends:
        found["down"] = True  # no new work; what it does ends
    return found


def in_cluster(account: Path = ACCOUNT, host: str = "https://kubernetes.default.svc") -> httpx.AsyncClient:
    """A client for the API server as a pod sees it; checks the cluster's own authority."""
    return httpx.AsyncClient(base_url=host, verify=str(account / "ca.crt"), timeout=10.0, trust_env=False)


def account_token(account: Path = ACCOUNT) -> str | None:
    """The token of the pod's service account as it is now."""
    path = account / "token"
    return path.read_text().strip() if path.exists() else None


def _uid(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['name']}/{pod['metadata'].get('uid', '')}"


def _ready(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
