"""Members of enums that every request asks for, bound once. Pure.

Compiled code reads these like variables of C. `Mode.PARALLEL` is a look-up in the class, and on Python 3.11 one that
calls the metaclass: some 900 instructions, and a request asked forty times.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.lifecycle.stages import On
from omni_proxy.messages import Leg, Mode, Outcome, Stage

RECEIVED: Final = Stage.RECEIVED
PREFILL_SCHEDULED: Final = Stage.PREFILL_SCHEDULED
DECODE_WAITING: Final = Stage.DECODE_WAITING
DECODE_SCHEDULED: Final = Stage.DECODE_SCHEDULED
FINISHED: Final = Stage.FINISHED

ON_MATCH: Final = On.MATCH
ON_ENQUEUE_PREFILL: Final = On.ENQUEUE_PREFILL
ON_ENQUEUE_DECODE: Final = On.ENQUEUE_DECODE
ON_GRANTED: Final = On.GRANTED
ON_SENT: Final = On.SENT
ON_PREFILL_DONE: Final = On.PREFILL_DONE
ON_COMPLETED: Final = On.COMPLETED

PARALLEL: Final = Mode.PARALLEL
AGGREGATED: Final = Mode.AGGREGATED

PREFILL_LEG: Final = Leg.PREFILL
DECODE_LEG: Final = Leg.DECODE
PREWARM_LEG: Final = Leg.PREWARM

COMPLETED: Final = Outcome.COMPLETED
