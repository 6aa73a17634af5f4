"""Only who names a living lease whole may read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from omni_proxy.workers.engine.leases import Claim, Lease, LeaseBook, Refusal

LAYOUT: Final[dict[str, str | int]] = {"block_size": 16, "dtype": "float32"}
CLAIM = Claim("P", "r", (4, 2), 20, "digest", LAYOUT)


def book() -> LeaseBook:
    leases = LeaseBook("P", LAYOUT, lease_s=30.0, grace_s=5.0)
    leases.grant("r", (4, 2), 20, "digest", now=100.0)
    return leases


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (replace(CLAIM, engine_id="Q"), "this is engine P, not Q"),
        (replace(CLAIM, request_id="other"), "no KV is kept for request other"),
        (replace(CLAIM, block_ids=(4, 3)), "does not have these blocks"),
        (replace(CLAIM, block_ids=(4,)), "does not have these blocks"),
        (replace(CLAIM, num_tokens=19), "has KV of 20 tokens, not 19"),
        (replace(CLAIM, prompt_digest="?"), "had another prompt"),
        (replace(CLAIM, layout={**LAYOUT, "block_size": 32}), "block_size is 16 here and 32 there"),
        (replace(CLAIM, layout={"block_size": 16}), "dtype is float32 here and None there"),
    ],
)
def test_a_claim_that_differs_is_refused(claim: Claim, reason: str) -> None:
    answer = book().open(claim, now=101.0)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


def test_a_lease_ends_by_time() -> None:
    leases = book()
    assert leases.next_expiry() == 130.0
    assert leases.expire(129.9) == []
    assert isinstance(leases.open(CLAIM, now=130.0), Refusal)
    assert leases.expire(130.0) == ["r"]
    assert leases.next_expiry() is None


def test_reading_keeps_a_lease_alive() -> None:
    leases = book()
    lease = leases.open(CLAIM, now=129.0)
    assert isinstance(lease, Lease)
    assert leases.expire(133.9) == []
    assert isinstance(leases.read("r", lease.serial, now=133.9), Lease)
    assert leases.expire(138.8) == []
    assert leases.expire(138.9) == ["r"]


def test_an_old_serial_reads_and_ends_nothing_of_a_new_lease() -> None:
    leases = book()
    old = leases.open(CLAIM, now=101.0)
    assert isinstance(old, Lease)
    assert leases.close("r", old.serial)
    assert not leases.close("r", old.serial)
    leases.grant("r", (4, 2), 20, "digest", now=102.0)
    assert isinstance(leases.read("r", old.serial, now=103.0), Refusal)
    assert not leases.close("r", old.serial)
    assert "r" in leases
    assert leases.close("r")
    assert len(leases) == 0
