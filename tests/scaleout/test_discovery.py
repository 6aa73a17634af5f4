"""Sources of workers: what they may say, and what happens when they say nonsense or nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest

from omni_proxy.config import Worker
from omni_proxy.workers.discovery.file import FileSource
from omni_proxy.workers.discovery.finder import Finder
from omni_proxy.workers.discovery.kubernetes import PodSource, SliceSource, candidate
from omni_proxy.workers.discovery.vetting import MOST_WORKERS, Candidate, Unusable, url_of, vet


def entry(name: str, url: str, role: str = "prefill", **more: object) -> dict[str, object]:
    return {"name": name, "url": url, "role": role, **more}


def test_what_is_wrong_with_one_candidate_harms_no_other() -> None:
    candidates = [
        entry("good", "http://10.0.0.1:8000"),
        entry("v6", url_of("fd00::1", 8000), "decode"),
        entry("self", "http://10.0.0.9:80"),
        entry("a b", "http://10.0.0.2:8000"),
        entry("norole", "http://10.0.0.3:8000", "boss"),
        entry("port", "http://10.0.0.4:99999"),
        {"url": "http://10.0.0.5:8000", "role": "prefill"},
    ]
    workers, refused = vet("s", candidates, [("10.0.0.9", 80)])
    assert [(w.name, w.url) for w in workers] == [("good", "http://10.0.0.1:8000"), ("v6", "http://[fd00::1]:8000")]
    reasons = {one.name: one.reason for one in refused}
    assert reasons["self"] == "http://10.0.0.9:80 is this gateway's own address"
    assert reasons["norole"].startswith("role: ")
    assert "'boss'" in reasons["norole"]
    assert "impossible port" in reasons["port"]
    assert set(reasons) == {"self", "a b", "norole", "port", "?"}


def test_contradictions_are_refused_on_both_sides_and_repetition_is_none() -> None:
    url = "http://10.0.0.1:8000"
    workers, refused = vet("s", [entry("a", url), entry("b", url, "decode")])
    assert workers == []
    assert {one.reason for one in refused} == {
        f"{url} has two roles: prefill and decode",
        f"{url} has two roles: decode and prefill",
    }
    workers, refused = vet("s", [entry("a", url), entry("a", "http://10.0.0.2:8000")])
    assert workers == []
    assert "the name stands for two workers" in refused[0].reason
    workers, refused = vet("s", [entry("a", url), entry("a", url)])
    assert ([w.name for w in workers], refused) == (["a"], [])


def test_a_flood_changes_nothing() -> None:
    flood = [entry(f"w{n}", f"http://10.1.{n // 250}.{n % 250}:80") for n in range(MOST_WORKERS + 1)]
    with pytest.raises(Unusable, match="2001 workers at once"):
        vet("s", flood)
    used: list[list[Worker]] = []
    finder = Finder([FileSource(Path("unused"))], lambda name, workers: used.append(workers))
    finder.take("file", [entry("a", "http://10.0.0.1:8000")])
    finder.take("file", flood)
    finder.take("file", [entry("a", "http://10.0.0.1:8000")])
    assert [[w.name for w in workers] for workers in used] == [["a"]]
    assert finder.states["file"].failures == 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_file_is_read_again_and_its_last_good_state_stays(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text("workers:\n- {name: a, url: 'http://10.0.0.1:80', role: prefill}\n")
    used: list[list[str]] = []
    finder = Finder([FileSource(path, 0.01)], lambda name, workers: used.append([w.name for w in workers]))
    task = asyncio.create_task(finder.run())
    try:
        await until(lambda: used == [["a"]])
        path.write_text("workers: [")
        await until(lambda: finder.states["file"].fault is not None)
        path.unlink()
        await until(lambda: "No such file" in str(finder.states["file"].fault))
        assert used == [["a"]]
        path.write_text("workers:\n- {name: b, url: 'http://10.0.0.2:80', role: decode}\n")
        await until(lambda: used == [["a"], ["b"]])
        assert finder.states["file"].fault is None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Told:
    """A source that says one thing, and then nothing."""

    def __init__(self, name: str, *candidates: Candidate) -> None:
        self.name = name
        self._candidates = candidates
        self.running = 0

    async def run(self, found: Callable[[Sequence[Candidate]], None], failed: Callable[[str], None]) -> None:
        self.running += 1
        try:
            found(self._candidates)
            await asyncio.Event().wait()
        finally:
            self.running -= 1


class Breaking(Told):
    """A source that breaks off in a way that nobody foresaw, or ends, so many times."""

    def __init__(self, name: str, times: int, ends: bool, *candidates: Candidate) -> None:
        super().__init__(name, *candidates)
        self._times = times
        self._ends = ends
        self.begun = 0

    async def run(self, found: Callable[[Sequence[Candidate]], None], failed: Callable[[str], None]) -> None:
        self.begun += 1
        if self.begun <= self._times:
            found(self._candidates)
            if self._ends:
                return
            raise KeyError("nobody foresaw this")
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("ends", "fault"), [(True, "it ended"), (False, "it broke off (KeyError: 'nobody foresaw this')")]
)
async def test_a_source_that_breaks_off_harms_no_other_and_is_started_again(ends: bool, fault: str) -> None:
    used: list[tuple[str, list[str]]] = []
    breaking = Breaking("dns x", 3, ends, entry("b", "http://10.0.0.2:80"))
    steady = Told("file", entry("a", "http://10.0.0.1:80"))
    finder = Finder(
        [breaking, steady], lambda name, workers: used.append((name, [w.name for w in workers])), pauses_s=(0.01, 0.02)
    )
    task = asyncio.create_task(finder.run())
    try:
        await until(lambda: breaking.begun == 4)
        assert steady.running == 1
        assert sorted(used) == [("dns x", ["b"]), ("file", ["a"])], "what it said stays, and is said once"
        assert (finder.states["dns x"].fault, finder.states["dns x"].failures) == (fault, 3)
        assert finder.states["file"].fault is None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert steady.running == 0
    finder.follow([])
    finder.failed("dns x", "said too late")
    finder.take("dns x", [entry("c", "http://10.0.0.3:80")])
    assert used[-1][1] == []


async def test_other_sources_take_over_while_it_runs() -> None:
    used: dict[str, list[str]] = {}
    old = [Told("file", entry("a", "http://10.0.0.1:80")), Told("dns x", entry("b", "http://10.0.0.2:80"))]
    finder = Finder(old, lambda name, workers: used.update({name: [w.name for w in workers]}))
    task = asyncio.create_task(finder.run())
    try:
        await until(lambda: used == {"file": ["a"], "dns x": ["b"]})
        new = [Told("file", entry("c", "http://10.0.0.3:80")), Told("dns y", entry("d", "http://10.0.0.4:80"))]
        finder.follow(new)
        assert used == {"file": ["a"], "dns x": []}, "what is not named any more goes, the rest stays until it is told"
        await until(lambda: used == {"file": ["c"], "dns x": [], "dns y": ["d"]})
        assert [source.running for source in (*old, *new)] == [0, 0, 1, 1]
        assert set(finder.states) == {"file", "dns y"}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ----------------------------------------------------------------------------------------------- Kubernetes


def pod(name: str, ip: str, role: str | None = "prefill", ready: bool = True, ends: bool = False) -> dict[str, object]:
    meta: dict[str, object] = {"name": name, "uid": f"u-{name}", "resourceVersion": "1"}
    meta["annotations"] = {} if role is None else {"omni-proxy.io/role": role, "omni-proxy.io/dp-size": "2"}
    if ends:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {"metadata": meta, "status": {"phase": "Running", "podIP": ip, "conditions": [condition]}}


class _Lines(httpx.AsyncByteStream):
    def __init__(self, queue: asyncio.Queue[object]) -> None:
        self._queue = queue

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield json.dumps(item).encode() + b"\n"


class FakeApi:
    """Speaks list and watch as the API server does, as far as a client can tell."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, object]] = {}
        self.version = 10
        self.watched_from: list[str] = []
        self.lists = 0
        self.forgotten = False
        self.broken = False
        self.queue: asyncio.Queue[object] = asyncio.Queue()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if self.broken:
            raise httpx.ConnectError("refused")
        query = request.url.params
        assert query["labelSelector"] == "app=vllm"
        assert request.headers["authorization"] == "Bearer t0ken"
        if "watch" not in query:
            self.lists += 1
            self.forgotten = False
            items = sorted(self.pods.values(), key=str)
            half = len(items) // 2
            first = "continue" not in query and half > 0
            page = items[:half] if first else items[half:]
            meta = {"resourceVersion": str(self.version), **({"continue": "x"} if first else {})}
            return httpx.Response(200, json={"metadata": meta, "items": page})
        self.watched_from.append(query["resourceVersion"])
        if self.forgotten:
            return httpx.Response(410, json={})
        self.queue = asyncio.Queue()
        return httpx.Response(200, stream=_Lines(self.queue))

    def put(self, made: dict[str, object], kind: str = "ADDED") -> None:
        self.version += 1
        meta = made["metadata"]
        assert isinstance(meta, dict)
        meta["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            self.pods.pop(meta["name"], None)
        else:
            self.pods[meta["name"]] = made
        self.queue.put_nowait({"type": kind, "object": made})


async def test_pods_are_followed_through_everything_that_an_api_server_does() -> None:
    api = FakeApi()
    api.pods = {"p0": pod("p0", "10.0.0.1"), "d0": pod("d0", "fd00::2", "decode")}
    client = httpx.AsyncClient(transport=httpx.MockTransport(api.handle), base_url="http://api")
    source = PodSource(client, "default", "app=vllm", lambda: "t0ken", retry_s=0.005)
    seen: list[dict[str, Candidate]] = []
    faults: list[str] = []

    def found(candidates: Sequence[Candidate]) -> None:
        seen.append({str(c["name"]): c for c in candidates})

    def now(*names: str) -> Callable[[], bool]:
        return lambda: bool(seen) and set(seen[-1]) == set(names)

    task = asyncio.create_task(source.run(found, faults.append))
    try:
        await until(lambda: now("p0", "d0")() and len(api.watched_from) == 1)
        assert seen[-1]["d0"]["url"] == "http://[fd00::2]:8000"
        assert seen[-1]["d0"]["dp_size"] == "2"
        api.put(pod("p1", "10.0.0.3", ready=False))
        api.put(pod("p2", "10.0.0.4"))
        await until(now("p0", "d0", "p2"))
        api.put(pod("p2", "10.0.0.4", ready=False, ends=True), "MODIFIED")
        await until(lambda: seen[-1]["p2"].get("down") is True)
        api.put(pod("p2", "10.0.0.4"), "DELETED")
        await until(now("p0", "d0"))

        api.queue.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}})
        api.queue.put_nowait(None)  # the server ends the watch, as it does every few minutes
        await until(lambda: api.watched_from[-1] == "77")
        assert api.lists == 2  # two pages of one list

        api.queue.put_nowait(httpx.ReadError("cut"))
        await until(lambda: len(api.watched_from) == 3)
        assert faults
        assert seen[-1].keys() == {"p0", "d0"}

        api.queue.put_nowait({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        await until(lambda: api.lists == 4)
        api.forgotten = True
        api.version = 99
        api.queue.put_nowait(None)
        await until(lambda: api.lists == 6)

        api.broken = True
        api.queue.put_nowait(None)
        before = len(faults)
        await until(lambda: len(faults) > before + 1)
        assert seen[-1].keys() == {"p0", "d0"}
        api.broken = False
        await until(lambda: api.watched_from[-1] == "99")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


def test_a_pod_without_a_role_is_refused_and_one_without_an_address_is_not_there() -> None:
    assert candidate({"metadata": {"name": "x"}, "status": {}}) is None
    made = candidate(pod("x", "10.0.0.1", role=None))
    assert made is not None
    workers, refused = vet("kubernetes", [made])
    assert workers == []
    assert refused[0].reason.startswith("role: ")


def endpoint(ip: str, name: str | None = None, **conditions: bool) -> dict[str, object]:
    made: dict[str, object] = {"addresses": [ip], "conditions": conditions}
    return made if name is None else made | {"targetRef": {"kind": "Pod", "name": name}}


async def test_endpoint_slices_are_followed_with_the_rules_of_services() -> None:
    api = FakeApi()
    labels = {"omni-proxy.io/role": "decode", "kubernetes.io/service-name": "decode"}
    slice_: dict[str, object] = {
        "metadata": {"name": "decode-abc", "uid": "u", "resourceVersion": "1", "labels": labels},
        "ports": [{"name": "http", "port": 8200}],
        "endpoints": [
            endpoint("10.0.0.1", "d0", ready=True),
            endpoint("10.0.0.2", "d1", ready=False),
            endpoint("10.0.0.3", "d2", ready=False, terminating=True, serving=True),
            endpoint("fd00::4"),
        ],
    }
    api.pods = {"decode-abc": slice_}
    client = httpx.AsyncClient(transport=httpx.MockTransport(api.handle), base_url="http://api")
    source = SliceSource(client, "default", "app=vllm", lambda: "t0ken", retry_s=0.005)
    seen: list[Sequence[Candidate]] = []
    faults: list[str] = []
    task = asyncio.create_task(source.run(seen.append, faults.append))
    try:
        await until(lambda: bool(seen))
        workers, refused = vet("kubernetes", seen[-1])
        assert not refused
        assert [(w.name, w.url, w.role.value, w.down) for w in workers] == [
            ("d0", "http://10.0.0.1:8200", "decode", False),
            ("d2", "http://10.0.0.3:8200", "decode", True),
            ("fd00-4", "http://[fd00::4]:8200", "decode", False),
        ]
        await until(lambda: len(api.watched_from) == 1)
        api.put({**slice_, "endpoints": None}, "MODIFIED")
        await until(lambda: seen[-1] == [])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not faults
