#!/usr/bin/env bash
# demo-1p1d, 1P1D: what runs on here. Made by `omni-proxy deploy render`.
set -euo pipefail
cd "$(dirname "$0")"
pids=()
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT

# prefill-0
omni-proxy \
  worker \
  --role prefill \
  --host 127.0.0.1 \
  --port 8100 \
  --side-channel-port 15600 \
  --served-model-name omni-demo &
pids+=($!)

# decode-0
omni-proxy \
  worker \
  --role decode \
  --host 127.0.0.1 \
  --port 8101 \
  --side-channel-port 15601 \
  --served-model-name omni-demo &
pids+=($!)

# the gateway
omni-proxy \
  serve \
  -c gateway.yaml &
pids+=($!)

wait -n "${pids[@]}"
