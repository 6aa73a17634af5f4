"""What a live gateway records replays to equal effects."""

from __future__ import annotations

from pathlib import Path

from omni_proxy.core import Core
from omni_proxy.sim.replay import replay
from tests.relay.conftest import Start
from tests.relay.scripted import prefill_ok
from tests.relay.teller import Teller


async def test_a_recorded_run_replays_equal(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "events"
    rig = await start({"record": str(log), "kv_cache_policy": "independent"})
    for stream in (True, False, True):
        assert (await rig.chat(stream=stream)).status_code == 200
    await rig.idle()
    rig.gateway.scheduling.recorder.flush()
    done = replay(log, Core)
    assert done.difference is None
    assert done.steps > 15


async def test_also_where_streams_lost_their_worker(start: Start, tmp_path: Path) -> None:
    """... and where KV was left behind, was freed in the end, and was computed again."""
    log = tmp_path / "events"
    teller = Teller(["a", "b", "c", "d", "e"], [2, None, 3, 1])
    each = {"p0": {"kv_lease_s": 0.2}, "p1": {"kv_lease_s": 0.2}}
    settings = {"record": str(log), "kv_cache_policy": "independent", "resume": True, "each": each}
    rig = await start(settings, p0=prefill_ok, p1=prefill_ok, d0=teller, d1=teller)
    for _ in range(3):
        assert (await rig.chat(stream=True)).text.endswith("data: [DONE]\n\n")
    assert rig.gateway.scheduling.tallies.resumes["continued"] == 3
    await rig.idle()
    rig.gateway.scheduling.recorder.flush()
    assert replay(log, Core).difference is None
