#!/usr/bin/env bash
# llama-2p1d, 2P1D: what runs on front. Made by `omni-proxy deploy render`.
set -euo pipefail
cd "$(dirname "$0")"
pids=()
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT

# the gateway
omni-proxy \
  serve \
  -c gateway.yaml &
pids+=($!)

wait -n "${pids[@]}"
