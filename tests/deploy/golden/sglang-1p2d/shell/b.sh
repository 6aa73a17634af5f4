#!/usr/bin/env bash
# qwen-1p2d, 1P2D: what runs on b. Made by `omni-proxy deploy render`.
set -euo pipefail
cd "$(dirname "$0")"
pids=()
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT

# decode-0
env \
  CUDA_VISIBLE_DEVICES=0,1,2,3 \
  python \
  -m sglang.launch_server \
  --model-path Qwen/Qwen3-32B \
  --host 10.0.2.12 \
  --port 30000 \
  --tp-size 4 \
  --disaggregation-mode decode \
  --disaggregation-transfer-backend nixl &
pids+=($!)

# decode-1
env \
  CUDA_VISIBLE_DEVICES=4,5,6,7 \
  python \
  -m sglang.launch_server \
  --model-path Qwen/Qwen3-32B \
  --host 10.0.2.12 \
  --port 30001 \
  --tp-size 4 \
  --disaggregation-mode decode \
  --disaggregation-transfer-backend nixl &
pids+=($!)

wait -n "${pids[@]}"
