"""`python -m benchmarks.apc`: prints what prefix awareness costs and how well it predicts."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from benchmarks.apc import measure
from benchmarks.apc.replay import Setting, replay

TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"


def main() -> None:
    options = _options()
    _parts(options.keys)
    for folder in options.tokenizer:
        _next_turn(folder)
    if options.trace.is_file():
        _replays(options.trace, options.minutes, options.text)
    else:
        print(f"no trace at {options.trace}: no replay (--trace FILE)")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apc", description=__doc__)
    parser.add_argument("--keys", type=int, default=2_000_000, help="keys in the index (default 2,000,000)")
    parser.add_argument("--trace", type=Path, default=TRACE, help="a Mooncake trace (default: the shared one)")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the trace (default 20)")
    parser.add_argument("--text", action="store_true", help="replay texts and tokenise them, not token ids")
    parser.add_argument(
        "--tokenizer", type=Path, action="append", default=[], metavar="FOLDER", help="a model folder; may come often"
    )
    return parser.parse_args()


def _parts(keys: int) -> None:
    print(f"keys of 1,000 units of 16 tokens        {measure.key_chain_us():8.0f} us")
    filled = measure.Filled(keys)
    median, slow = measure.match_us(filled)
    print(
        f"match, 1,000 blocks, {len(filled.index):,} keys      {median:8.0f} us median, {slow:.0f} us p99  (limit 300)"
    )
    del filled
    print(f"match where 32 workers hold the prompt  {measure.shared_match_us():8.0f} us")
    for what, size in measure.index_bytes(min(keys, 500_000)).items():
        print(f"memory per key, {what:30s}  {size:6.0f} bytes  (limit 250)")
    for what, seconds in asyncio.run(measure.mending_s()).items():
        print(f"right again after {what:40s} {seconds:5.2f} s  (limit 5)")


def _next_turn(folder: Path) -> None:
    new, whole, chars = measure.next_turn(folder)
    print(f"next turn of {chars:,} characters, {folder.name}: {new * 1e3:.2f} ms of CPU, whole {whole * 1e3:.1f} ms")
    print(f"    = {new / whole:.3f} of encoding it whole  (limit 0.1)")


def _replays(trace: Path, minutes: float, text: bool) -> None:
    for events, limit in ((True, 0.99), (False, 0.90)):
        result = replay(trace, Setting(minutes=minutes, events=events, text=text))
        print(
            f"replay of {minutes:g} minutes, {'with' if events else 'without'} events: "
            f"{result.exact:,} of {result.requests:,} predictions exact = {result.exact_share:.2%} "
            f"(limit {limit:.0%}); "
            f"cached {result.reported_tokens / result.prompt_tokens:.1%} of prompt tokens"
        )


if __name__ == "__main__":
    main()
