#!/usr/bin/env bash
# qwen-1p2d, 1P2D: what runs on a. Made by `omni-proxy deploy render`.
set -euo pipefail
cd "$(dirname "$0")"
pids=()
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT

# prefill-0
env \
  CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
  python \
  -m sglang.launch_server \
  --model-path Qwen/Qwen3-32B \
  --host 10.0.2.11 \
  --port 30000 \
  --tp-size 8 \
  --disaggregation-mode prefill \
  --disaggregation-bootstrap-port 8998 \
  --disaggregation-transfer-backend nixl &
pids+=($!)

# the gateway
omni-proxy \
  serve \
  -c gateway.yaml &
pids+=($!)

wait -n "${pids[@]}"
