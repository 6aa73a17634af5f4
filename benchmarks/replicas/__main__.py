"""`python -m benchmarks.replicas`: several gateways before the same workers, in the simulator, against one.

The same core, each with the view of the others that reports of some age give.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.replicas.measure import Row, run

TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE", help="Mooncake .jsonl")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="the first N requests only")
    parser.add_argument("--load", type=float, default=0.75)
    parser.add_argument("--load-basis", choices=("cold", "shared"), default="cold")
    parser.add_argument("--replicas", default="1,2,4,8", metavar="N,N,...")
    parser.add_argument("--interval", type=float, default=0.01, metavar="S", help="between reports (default 0.01)")
    parser.add_argument("--delay", type=float, default=0.002, metavar="S", help="of a report (default 0.002)")
    parser.add_argument("--alone", action="store_true", help="also without reports, as when Redis is gone")
    return parser.parse_args()


def main() -> int:
    """Print the table."""
    options = _options()
    counts = [int(text) for text in options.replicas.split(",")]
    cases: list[tuple[int, float | None]] = [(count, options.interval) for count in counts]
    if options.alone:
        cases += [(count, None) for count in counts if count > 1]
    sys.stdout.write(f"{options.trace.name}, 6P + 6D, load {options.load:g} ({options.load_basis})\n")
    sys.stdout.write(f"{'gateways':12}{'view':>10}{'mean':>14}{'p50':>8}{'p90':>8}{'p99':>8}{'cached':>9}{'CPU':>8}\n")
    one: Row | None = None
    for count, interval_s in cases:
        begun = time.process_time()
        row = run(options.trace, options.limit, options.load, options.load_basis, count, interval_s, options.delay)
        one = one or row
        view = "-" if count == 1 else "none" if interval_s is None else f"{interval_s * 1000:g} ms"
        against = f"{row.ttft.mean:.3f} ({row.ttft.mean / one.ttft.mean:.3f})"
        sys.stdout.write(
            f"{count:<12}{view:>10}{against:>14}{row.ttft.p50:8.3f}{row.ttft.p90:8.2f}{row.ttft.p99:8.2f}"
            f"{row.cached * 100:8.1f}%{time.process_time() - begun:7.0f}s\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
