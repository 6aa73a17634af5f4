"""The store of ended requests: bounded, and found by either id."""

from __future__ import annotations

from omni_proxy.messages import RequestRecord
from omni_proxy.observe.timelines import Timelines
from tests.test_log_lines import MARKS, record


def told(rid: str, external_id: str) -> RequestRecord:
    kept = record(MARKS)
    kept.rid, kept.external_id = rid, external_id
    return kept


def test_the_oldest_go_and_the_last_of_one_id_is_found() -> None:
    store = Timelines(3)
    for rid, external_id in (("r1", "a"), ("r2", "b"), ("r3", "b"), ("r4", "r3")):
        store.closed(told(rid, external_id), 0.0)
    assert [r.rid for r in store.last(2)] == ["r4", "r3"]
    assert [r.rid for r in store.last(9)] == ["r4", "r3", "r2"]
    assert store.find("a") is None
    assert store.find("r1") is None
    assert [getattr(store.find(name), "rid", None) for name in ("b", "r2", "r3")] == ["r3", "r2", "r4"], (
        "clients' first"
    )


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    store = Timelines(0)
    store.closed(told("r1", "a"), 0.0)
    assert (store.last(9), store.find("r1")) == ([], None)
