"""`omni-proxy worker --simulate`: from options to a serving process."""

from __future__ import annotations

import argparse

from omni_proxy.sim.presets import chosen_model
from omni_proxy.sim.pretend.life import run_pretend
from omni_proxy.sim.pretend.options import PretendOptions


def pretend(options: argparse.Namespace) -> int:
    """Serve until told to stop. Raises ConfigError."""
    model = chosen_model(options.simulate, options.engine)
    return run_pretend(
        PretendOptions(
            model=model,
            preset=options.simulate,
            role=options.role,
            host=options.host,
            port=options.port,
            served_model_name=tuple(options.served_model_name) or ("simulated",),
            block_size=options.block_size,
            speed=options.speed,
            output_tokens=options.output_tokens,
            kv_lease_s=options.kv_lease,
            kv_events_port=options.kv_events_port,
            bootstrap_port=options.bootstrap_port,
            scale_out=options.enable_scale_out,
            drain_s=options.drain,
            ready_fd=options.ready_fd,
            parent_fd=options.parent_fd,
            log_level=options.log_level,
        )
    )
