#!/usr/bin/env bash
# Records every event and decision of a run, and replays them against a fresh core: equal, step by step.
# A live gateway records the same with `record: FILE` in its config.
#   examples/replay_log.sh [FILE]
set -euo pipefail
log=${1:-$(mktemp)}

omni-proxy simulate --synthetic bursts,requests=200 --prefill 1 --decode 1 --record "$log"
omni-proxy replay "$log"
