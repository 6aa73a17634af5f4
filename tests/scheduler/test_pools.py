"""Which workers serve a model together, and how."""

from __future__ import annotations

from collections.abc import Iterable

from omni_proxy.messages import Mode, Role, WorkerSpec
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.pools import Pool, Pools
from tests.core.steps import worker


def pools_of(*specs: WorkerSpec | str, mode: Mode | None = None, down: str = "") -> Pools:
    ledger = Ledger()
    for one in specs:
        ledger.put(worker(one) if isinstance(one, str) else one)
    for name in down.split():
        ledger.down(name, "x")
    return Pools(ledger, mode)


def pool_of(*specs: WorkerSpec | str, mode: Mode | None = None, down: str = "", model: str = "m") -> Pool:
    pool = pools_of(*specs, mode=mode, down=down).of(model)
    assert pool is not None
    return pool


def names(workers: Iterable[WorkerLoad]) -> str:
    return " ".join(w.spec.name for w in workers)


def sides(pool: Pool) -> tuple[Mode, str, str]:
    return pool.mode, names(pool.prefill), names(pool.decode)


SEQUENTIAL, PARALLEL, AGGREGATED = Mode.SEQUENTIAL, Mode.PARALLEL, Mode.AGGREGATED


def test_p_and_d_make_a_pair() -> None:
    pool = pool_of("p0", "p1", "d0", "m0")
    assert sides(pool) == (SEQUENTIAL, "p0 p1", "d0")
    assert pool.ready


def test_mixed_workers_serve_alone() -> None:
    assert sides(pool_of("m0", "m1")) == (AGGREGATED, "", "m0 m1")


def test_the_mode_is_what_the_members_can_do() -> None:
    def only(name: str) -> WorkerSpec:
        return worker(name, modes=(PARALLEL,))

    assert sides(pool_of(only("p0"), only("d0"))) == (PARALLEL, "p0", "d0")
    assert not pool_of(only("p0"), only("d0"), mode=SEQUENTIAL).ready
    assert not pool_of(worker("p0", modes=(SEQUENTIAL,)), only("d0")).ready
    assert not pool_of(only("m0")).ready


def test_the_mode_can_be_set() -> None:
    assert sides(pool_of("p0", "d0", mode=PARALLEL)) == (PARALLEL, "p0", "d0")
    assert sides(pool_of("p0", "d0", mode=AGGREGATED)) == (AGGREGATED, "", "d0 p0")
    assert sides(pool_of("p0", "d0", "m0", mode=AGGREGATED)) == (AGGREGATED, "", "m0")
    assert sides(pool_of("m0", mode=PARALLEL)) == (PARALLEL, "", "")


def test_a_mode_that_can_serve_now_goes_before_one_that_could() -> None:
    assert sides(pool_of("p0", "d0", "m0", down="d0")) == (AGGREGATED, "", "m0")
    assert sides(pool_of("p0", "d0", "m0", down="d0 m0")) == (SEQUENTIAL, "", "")
    assert not pool_of("p0", "d0", down="p0").ready


def test_only_members_of_one_domain_pair() -> None:
    one, two = {"group": "1"}, {"group": "2"}
    pool = pool_of(worker("p1", **one), worker("d1", **one), worker("p2", **two), worker("d3", group="3"))
    assert sides(pool) == (SEQUENTIAL, "p1", "d1")
    assert not pool_of(worker("p0", connector="a"), worker("d0", connector="b")).ready


def test_partners_and_receivers_by_domain() -> None:
    one, two = {"group": "1"}, {"group": "2"}
    pool = pool_of(
        worker("p1", **one), worker("d1", **one), worker("p2", **two), worker("d2", **two), down="p2", mode=PARALLEL
    )
    assert {key: names(value) for key, value in pool.partners.items()} == {("1", ""): "d1"}
    assert {key: names(value) for key, value in pool.receivers.items()} == {("1", ""): "d1", ("2", ""): "d2"}


def test_a_domain_whose_receivers_are_out_is_not_one_without_receivers() -> None:
    pool = pool_of("p0", "d0", "m0", down="d0")
    assert dict(pool.receivers) == {("", ""): ()}
    assert dict(pool_of("p0", "m0").receivers) == {}


def test_draining_members_are_out() -> None:
    ledger = Ledger()
    for name in ("p0", "p1", "d0"):
        ledger.put(worker(name))
    ledger.drain("p0")
    pool = Pools(ledger, None).of("m")
    assert pool is not None
    assert sides(pool) == (SEQUENTIAL, "p1", "d0")


def test_models() -> None:
    pools = pools_of(worker("p0", models=("a", "b")), worker("d0", models=("a",)), worker("d1", models=("b",)))
    a, b = pools.of("a"), pools.of("b")
    assert a is not None
    assert b is not None
    assert (names(a.decode), names(b.decode)) == ("d0", "d1")
    assert pools.of("c") is None
    assert pools.of("a") is a


def test_any_ready() -> None:
    assert not pools_of().any_ready()
    assert not pools_of("p0").any_ready()
    assert pools_of("p0", "d0").any_ready()
    assert pools_of(worker("p0", models=("a",)), "p1", worker("d1", models=("b",))).any_ready()
    assert not pools_of(worker("p0", models=("a",)), worker("d1", models=("b",))).any_ready()


def test_changes_are_seen_after_they_are_told() -> None:
    ledger = Ledger()
    pools = Pools(ledger, None)
    assert pools.of("m") is None
    ledger.put(worker("m0"))
    pools.changed()
    assert pools.of("m") is not None


def test_unknown_models_do_not_fill_memory() -> None:
    pools = pools_of(worker("p0", models=("a",)))
    for number in range(3000):
        assert pools.of(f"unknown-{number}") is None
    assert len(pools._pools) <= 1001


def backup(name: str) -> WorkerSpec:
    return worker(name, backup=True)


def test_a_mode_that_needs_backups_is_chosen_last() -> None:
    assert sides(pool_of("p0", "d0", backup("d1"))) == (SEQUENTIAL, "p0", "d0 d1"), "who is picked decides"
    assert sides(pool_of("p0", backup("d1"), "m0")) == (AGGREGATED, "", "m0")
    assert sides(pool_of("p0", backup("d1"), "m0", down="m0")) == (SEQUENTIAL, "p0", "d1")
    assert sides(pool_of("p0", "d0", backup("m0"))) == (SEQUENTIAL, "p0", "d0")
    assert sides(pool_of("p0", "d0", backup("m0"), down="p0")) == (AGGREGATED, "", "m0")
    assert sides(pool_of("p0", "d0", backup("m0"), mode=AGGREGATED)) == (AGGREGATED, "", "d0 m0 p0")


def test_backups_do_both_legs_only_where_nobody_else_does() -> None:
    assert names(pool_of("p0", "d0", "m0", backup("m1")).alone) == "m0 m1"
    assert names(pool_of("p0", "d0", backup("m1")).alone) == "d0 m1"
    assert names(pool_of("p0", backup("d0"), backup("m1")).alone) == "m1"
    assert names(pool_of("p0", backup("d0")).alone) == "d0"


def test_a_model_may_have_a_mode_of_its_own() -> None:
    ledger = Ledger()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("m", Role.MIXED)):
        ledger.put(WorkerSpec(name, role))
    pools = Pools(ledger, None, {"small": "aggregated"})
    small, other = pools.of("small"), pools.of("other")
    assert small is not None
    assert other is not None
    assert (small.mode, [w.name for w in small.decode]) == (Mode.AGGREGATED, ["m"])
    assert other.mode is Mode.SEQUENTIAL
