"""What is learned of answers, apart for those that begin with thoughts."""

from __future__ import annotations

from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Leg, RequestSpec, Role, WorkerSpec
from omni_proxy.scheduler.learning import Learning
from omni_proxy.scheduler.ledger import Ledger


def test_thoughts_make_answers_long_and_no_others() -> None:
    ledger = Ledger()
    ledger.put(WorkerSpec("d0", Role.DECODE))
    learning = Learning(ledger)
    plain, thinking = (Request(str(t), RequestSpec("m", "/", 10, thinking=t), 0.0) for t in (False, True))
    for _ in range(50):
        for request, tokens in ((plain, 20), (thinking, 4000)):
            lease = request.new_lease("d0", Leg.DECODE)
            ledger.grant(lease, 0, 10)
            request.completion_tokens = tokens
            learning.answered(request, lease, 1.0)
            ledger.release(lease)
    assert learning.answer_tokens(plain) == 20
    assert learning.answer_tokens(thinking) == 4000
