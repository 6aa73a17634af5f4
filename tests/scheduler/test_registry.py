"""Names that a config may use."""

from __future__ import annotations

import pytest

from omni_proxy.core import Core, CoreSettings
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.registry import DECODE_PLACERS, PREFILL_PLACERS
from tests.core.steps import worker


@pytest.mark.parametrize("name", PREFILL_PLACERS)
def test_every_prefill_placer_measures_an_idle_worker(name: str) -> None:
    placer = PREFILL_PLACERS[name]()
    assert placer.load(Ledger().put(worker("p0")), 0) == 0.0
    assert placer.reason


@pytest.mark.parametrize("name", DECODE_PLACERS)
def test_every_decode_placer_measures_an_idle_worker(name: str) -> None:
    placer = DECODE_PLACERS[name]()
    assert placer.load(Ledger().put(worker("d0")), 0) == 0.0
    assert placer.reason


@pytest.mark.parametrize("field", ["prefill_placer", "decode_placer"])
def test_an_unknown_name_is_an_error_at_load(field: str) -> None:
    with pytest.raises(KeyError, match="no-such"):
        Core(CoreSettings(**{field: "no-such"}))  # type: ignore[arg-type]
