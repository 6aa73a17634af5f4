"""What a live gateway records replays to equal effects."""

from __future__ import annotations

from pathlib import Path

from omni_proxy.core import Core
from omni_proxy.sim.replay import replay
from tests.relay.conftest import Start


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
