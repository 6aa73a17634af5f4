"""What stands above every order: retries, starvation, classes, fair shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.lineup import Lineup, Shares
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.registry import make_lineup
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.scheduler.test_orders import waiting


def lineup(**settings: object) -> Lineup:
    chosen = {"order": "shortest-uncached", **settings}
    return make_lineup(SchedulingSettings(**chosen))  # type: ignore[arg-type]


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.push(request, ("m",), 99.0, first=request.retries > 0)
    return queue


def names(lined: list[Request]) -> str:
    return "".join(r.rid for r in lined)


def retried(rid: str) -> Request:
    request = waiting(rid, 5000, since=3.0)
    request.retries = 1
    return request


def test_retries_then_the_starved_then_classes_then_the_order() -> None:
    queue = queue_of(
        waiting("a", 10, since=8.0, priority=1),
        waiting("b", 20, since=8.0),
        waiting("c", 10, since=8.0),
        waiting("d", 900, since=1.0, priority=5),
        waiting("e", 800, since=2.0),
        retried("f"),
    )
    assert names(lineup(starvation_timeout_s=7.5).head(queue, 9, 10.0)) == "fdecba"
    assert names(lineup(starvation_timeout_s=7.5).head(queue, 2, 10.0)) == "fd"


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 60), st.integers(-3, 3)), min_size=2, max_size=30),
    st.sampled_from(["weighted", "fcfs", "shortest-uncached", "deadline", "omni-nginx"]),
    st.booleans(),
)
def test_nobody_overtakes_the_starved(rows: list[tuple[int, int, int]], order: str, fair: bool) -> None:
    requests = [
        waiting(str(n), tokens, since=float(since), priority=priority, tenant=str(n % 3))
        for n, (tokens, since, priority) in enumerate(rows)
    ]
    settings = SchedulingSettings(order=order, starvation_timeout_s=30.0, fair_tenants=fair)
    head = make_lineup(settings).head(queue_of(*requests), len(requests), 60.0)
    assert sorted(r.rid for r in head) == sorted(r.rid for r in requests)
    starved = [r.queued_at for r in head if r.queued_at <= 30.0]
    assert [r.queued_at for r in head[: len(starved)]] == sorted(starved)


def take(line: Lineup, queue: WaitingQueue, count: int) -> str:
    """Serve `count` requests one after another."""
    served = ""
    for _ in range(count):
        request = line.head(queue, 1, 0.0)[0]
        queue.remove(request)
        line.took(request, request.prompt_tokens, 0.0, 0.0)
        served += request.spec.tenant
    return served


def test_tenants_share_by_weight_however_much_each_asks_for() -> None:
    requests = [waiting(f"a{n}", 10, tenant="a") for n in range(40)]
    requests += [waiting(f"b{n}", 10, tenant="b") for n in range(40)]
    line = lineup(fair_tenants=True, tenant_weights={"a": 3.0})
    served = take(line, queue_of(*requests), 20)
    assert served.count("a") == 15
    assert "aaaa" not in served.replace("b", "b", 1)[4:], "nobody waits for a whole share of another"


def test_who_comes_back_gets_no_credit_for_absence() -> None:
    line = lineup(fair_tenants=True)
    busy = [waiting(f"a{n}", 10, tenant="a") for n in range(30)] + [waiting(f"c{n}", 10, tenant="c") for n in range(30)]
    queue = queue_of(*busy)
    take(line, queue, 30)
    for n in range(30):
        queue.push(waiting(f"b{n}", 10, tenant="b"), ("m",), 99.0)
    assert take(line, queue, 9).count("b") in (3, 4)


def test_one_tenant_keeps_the_order() -> None:
    queue = queue_of(waiting("a", 30), waiting("b", 10), waiting("c", 20))
    assert names(lineup(fair_tenants=True).head(queue, 3, 0.0)) == "bca"


def test_tenants_are_bounded() -> None:
    shares = Shares({})
    for n in range(25_000):
        shares.took(str(n), 1)
    assert len(shares._had) <= 10_000
