#!/usr/bin/env bash
# llama-2p1d, 2P1D: what runs on p0. Made by `omni-proxy deploy render`.
set -euo pipefail
cd "$(dirname "$0")"
pids=()
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT

# prefill-0
env \
  CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.11 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=15600 \
  vllm \
  serve \
  meta-llama/Llama-3.3-70B-Instruct \
  --host 10.0.0.11 \
  --port 8100 \
  --served-model-name llama \
  --tensor-parallel-size 8 \
  --enable-prompt-tokens-details \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' \
  --max-num-batched-tokens 16384 &
pids+=($!)

wait -n "${pids[@]}"
