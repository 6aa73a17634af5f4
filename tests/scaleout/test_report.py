"""What gateways know of each other, without a network."""

from __future__ import annotations

import msgspec

from omni_proxy.messages import WorkerShare
from omni_proxy.replicas.report import VERSION, OtherGateways, Report

SHARE = WorkerShare("p0", 1, 100, 200, 2.0)


def report(gateway: str, *shares: WorkerShare, **more: object) -> Report:
    return Report(VERSION, gateway, shares, **more)  # type: ignore[arg-type]


def test_a_report_survives_its_way() -> None:
    sent = report("a", SHARE, waiting=3, ejected=(("p1", 2.5),), served=(("t", 7),), homes=(("s", "p0"),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Report) == sent


def test_reports_add_up_and_grow_old() -> None:
    others = OtherGateways("b", 3.0)
    others.heard(report("a", SHARE, waiting=2), 10.0)
    others.heard(report("c", SHARE), 10.5)
    event = others.event(11.0, 0.02)
    assert (event.gateways, event.place, event.turn_s, event.waiting) == (2, 1, 0.02, 2)
    assert event.loads == (WorkerShare("p0", 2, 200, 400, 2.5),)  # one second and half a second have passed


def test_who_is_silent_for_a_lease_is_gone_with_all_it_held() -> None:
    others = OtherGateways("b", 3.0)
    others.heard(report("a", SHARE), 10.0)
    assert not others.expire(12.9)
    assert others.expire(13.0)
    assert others.event(13.0, 0.0).loads == ()
    assert (others.names(), others.lost) == ([], 1)


def test_who_says_goodbye_is_gone_at_once() -> None:
    others = OtherGateways("b", 3.0)
    others.heard(report("a", SHARE), 10.0)
    assert others.heard(report("a", gone=True), 10.1)
    assert others.event(10.1, 0.0).gateways == 0
    assert others.lost == 0


def test_what_happened_is_told_once() -> None:
    others = OtherGateways("b", 3.0)
    others.heard(report("a", served=(("t", 5),), homes=(("s", "p1"),)), 1.0)
    others.heard(report("a", served=(("t", 7),)), 1.1)
    event = others.event(1.2, 0.0)
    assert (event.served, event.homes) == ((("t", 12),), (("s", "p1"),))
    assert (others.event(1.3, 0.0).served, others.event(1.3, 0.0).homes) == ((), ())


def test_only_what_most_of_the_others_eject_is_distrusted() -> None:
    others = OtherGateways("x", 9.0)
    others.heard(report("a", ejected=(("p0", 5.0), ("p1", 5.0))), 0.0)
    others.heard(report("b", ejected=(("p0", 4.0),)), 1.0)
    others.heard(report("c"), 1.0)
    assert others.event(2.0, 0.0).distrusted == (("p0", 3.0),)
    assert others.event(5.5, 0.0).distrusted == ()


def test_own_reports_and_those_of_another_version_are_not_heard() -> None:
    others = OtherGateways("a", 3.0)
    assert not others.heard(report("a", SHARE), 1.0)
    assert not others.heard(Report(VERSION + 1, "b", (SHARE,)), 1.0)
    assert others.event(1.0, 0.0).gateways == 0


def test_only_news_is_worth_a_report() -> None:
    before = report("a", SHARE)
    assert not report("a", WorkerShare("p0", 1, 100, 200, 0.5)).says_more(before)
    assert report("a", WorkerShare("p0", 2, 100, 200, 0.5)).says_more(before)
    assert report("a", SHARE, waiting=1).says_more(before)
    assert report("a", SHARE, served=(("t", 1),)).says_more(before)
    assert report("a", SHARE, ejected=(("p0", 1.0),)).says_more(before)
