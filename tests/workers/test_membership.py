"""Members that come, go and change, as the core hears of it. The workers answer on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_proxy.config import Health, Worker
from omni_proxy.messages import Event, WorkerAdded, WorkerDown, WorkerDraining, WorkerRemoved, WorkerUp
from omni_proxy.workers.membership import Membership
from omni_proxy.workers.probe import Description
from tests.relay.scripted import ScriptedWorker, prefill_ok

HEALTH = Health(interval_s=0.02, timeout_s=2.0, failures_down=1)


class Heard:
    """A membership whose events are remembered, and one live worker."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.live = worker
        self.events: list[Event] = []
        self.membership = Membership(self.events.append, HEALTH)

    def config(self, name: str = "p0", **more: Any) -> Worker:
        url = f"http://127.0.0.1:{self.live.port}"
        return Worker.model_validate({"name": name, "url": url, "role": "prefill", **more})

    def brief(self) -> list[tuple[str, str]]:
        """Kinds and names of what was heard since the last time."""
        events, self.events[:] = list(self.events), []
        return [
            (type(e).__name__, e.worker.name if isinstance(e, WorkerAdded | WorkerUp) else _name(e)) for e in events
        ]

    async def until(self, kind: type[Event]) -> Any:
        async with asyncio.timeout(5):
            while not any(isinstance(event, kind) for event in self.events):
                await asyncio.sleep(0.005)
        return next(event for event in self.events if isinstance(event, kind))


def _name(event: Event) -> str:
    assert isinstance(event, WorkerDown | WorkerDraining | WorkerRemoved)
    return event.name


@pytest.fixture
async def heard() -> AsyncIterator[Heard]:
    worker = ScriptedWorker(prefill_ok)
    await worker.start()
    one = Heard(worker)
    yield one
    await one.membership.close()
    await worker.stop()


async def up(heard: Heard, **more: Any) -> None:
    """p0 is a member and up."""
    heard.membership.set([heard.config(**more)])
    await heard.until(WorkerUp)
    assert heard.brief() == [("WorkerAdded", "p0"), ("WorkerUp", "p0")]


async def test_a_worker_that_answers_comes_up_with_what_it_says(heard: Heard) -> None:
    heard.membership.set([heard.config()])
    spec = (await heard.until(WorkerUp)).worker
    assert (spec.models, spec.max_model_len) == (("m",), 100_000)
    assert len(heard.membership.models()) == 1


async def test_nothing_changes_nothing(heard: Heard) -> None:
    await up(heard)
    assert heard.membership.set([heard.config()]) == []
    assert heard.brief() == []


async def test_a_changed_description_is_told_at_once(heard: Heard) -> None:
    described: list[tuple[Worker, Description]] = []
    heard.membership.on_described(lambda worker, said: described.append((worker, said)))
    await up(heard)
    heard.membership.set([heard.config(weight=3.0, models=["other"])])
    (event,) = heard.events
    assert isinstance(event, WorkerUp)
    assert (event.worker.weight, event.worker.models, event.worker.max_model_len) == (3.0, ("other",), 100_000)
    assert [worker.weight for worker, _ in described] == [1.0, 3.0]


async def test_another_address_is_another_worker(heard: Heard) -> None:
    await up(heard)
    moved = ScriptedWorker(prefill_ok)
    await moved.start()
    heard.membership.set([heard.config(url=f"http://127.0.0.1:{moved.port}")])
    await heard.until(WorkerUp)
    assert heard.brief() == [("WorkerDown", "p0"), ("WorkerAdded", "p0"), ("WorkerUp", "p0")]
    assert heard.membership.members()[0].url.endswith(str(moved.port))
    await moved.stop()


async def test_who_is_not_wanted_drains_until_he_is_removed(heard: Heard) -> None:
    await up(heard)
    assert heard.membership.set([]) == ["p0"]
    assert heard.membership.set([]) == [], "it is told once"
    assert heard.brief() == [("WorkerDraining", "p0")]
    assert heard.membership.is_leaving("p0")
    assert len(heard.membership.members()) == 1, "its requests still need its address"
    assert heard.membership.models() == []
    heard.membership.remove("p0")
    assert heard.brief() == [("WorkerRemoved", "p0")]
    assert not heard.membership.is_leaving("p0")


async def test_who_is_wanted_again_comes_back(heard: Heard) -> None:
    await up(heard)
    heard.membership.set([])
    heard.membership.set([heard.config()])
    assert not heard.membership.is_leaving("p0")
    await heard.until(WorkerUp)
    assert heard.brief() == [("WorkerDraining", "p0"), ("WorkerAdded", "p0"), ("WorkerUp", "p0")]


async def test_down_in_the_config_drains_and_stays(heard: Heard) -> None:
    await up(heard)
    assert heard.membership.set([heard.config(down=True)]) == []
    assert heard.brief() == [("WorkerDraining", "p0")]
    assert not heard.membership.is_leaving("p0")
    assert heard.membership.set([heard.config(down=True)]) == []
    assert heard.brief() == []
    heard.membership.set([heard.config()])
    await heard.until(WorkerUp)


async def test_a_worker_that_fails_its_probes_is_down_until_it_answers(heard: Heard) -> None:
    await up(heard)
    heard.live.healthy = False
    assert (await heard.until(WorkerDown)).reason == "/health says 503"
    heard.live.healthy = True
    await heard.until(WorkerUp)
    heard.membership.lost("p0", "its process ended")
    heard.membership.lost("stranger", "x")
    assert heard.brief() == [("WorkerDown", "p0"), ("WorkerUp", "p0"), ("WorkerDown", "p0")]
    await heard.until(WorkerUp)
