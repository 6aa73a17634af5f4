"""Real vLLM dies in the middle of an answer: `pytest -m real_vllm`."""

from __future__ import annotations

import pytest

from tests.real_engines.asking import CHAT, COMPLETIONS, body, stream, words
from tests.real_engines.conftest import Cluster
from tests.real_engines.processes import until

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(1200)]

TOKENS = 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_killed_decode_worker_leaves_no_trace_in_the_text(cluster: Cluster, path: str) -> None:
    asked = body(path, words(1000), tokens=TOKENS, ignore_eos=True, stream_options={"include_usage": True})
    undisturbed, response, whole = stream(cluster.gateway, path, asked)
    before = cluster.gateway.metric("omni_resumes_total", result="continued")
    victims: list[str] = []

    def kill() -> None:
        running = [d for d in ("d0", "d1") if cluster[d].metric("vllm:num_requests_running")]
        victims.extend(running)
        cluster[running[0]].kill()

    again, response, told = stream(cluster.gateway, path, asked, after=20, then=kill)
    assert again == undisturbed
    assert len(victims) == 1
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [told[-1]["usage"][name] for name in counts] == [whole[-1]["usage"][name] for name in counts]
    assert {event["id"] for event in told} == {told[0]["id"]}
    timeline = cluster.gateway.timeline(response)
    assert [resume["worker"] for resume in timeline["resumes"]] == victims
    assert cluster.gateway.metric("omni_resumes_total", result="continued") == before + 1
    until(lambda: cluster.gateway.workers()[victims[0]]["state"] != "up")
    left = cluster.gateway.post(path, body(path, words(1001)))
    assert left.status_code == 200
    assert cluster.gateway.timeline(left)["workers"]["decode"] not in victims
