"""What no scheduler can beat: every prompt at once on an idle worker, with all that anybody computed before cached."""

from __future__ import annotations

from collections.abc import Iterator

from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.run import Delays
from omni_proxy.sim.setup import known_tokens
from omni_proxy.sim.workload import Workload


def floor_ttfts(workload: Workload, model: EngineModel) -> Iterator[float]:
    """For each request the least TTFT in the simulator, in seconds.

    Caches hold what came before, of whatever age and on the right worker; nobody waits, shares a pass or a link; D has
    all of the KV that it could have. Prompts that no worker takes are left out, as the scheduler refuses them.
    """
    delays = Delays()
    hops = 4 * delays.network_s + 2 * (model.request_s + model.first_token_s)  # to P, back, to D, back
    after = model.link_s + model.step_s + model.decode_step_s(1, 0)
    for request, known in zip(workload.requests, known_tokens(workload), strict=True):
        if request.prompt_tokens >= model.max_model_len:
            continue
        tokenize_s = delays.tokenize_s + delays.tokenize_token_s * request.prompt_tokens
        yield tokenize_s + hops + model.alone_s(request.prompt_tokens - known, known) + after
