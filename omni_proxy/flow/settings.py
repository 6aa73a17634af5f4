"""What an operator may set about the core's decisions. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import Mode
from omni_proxy.scheduler.admission import Admission
from omni_proxy.scheduler.settings import SchedulingSettings


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What an operator may set; seconds and tokens as the names say."""

    schedule_mode: Mode | None = None
    """None: what the members can do, sequential before parallel before aggregated."""
    prefix_aware: bool = False
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    queue_timeout_s: float = 60.0
    no_worker_timeout_s: float = 10.0
    admission: Admission = field(default_factory=Admission)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    max_fails: int = 1
    fail_timeout_s: float = 10.0
    seed: int = 0
    """Of the choices between equals where there are other gateways."""
