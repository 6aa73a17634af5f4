#!/usr/bin/env bash
# deepseek-2p1d, 2P1D: what runs on d0. Made by `omni-proxy deploy render`.
set -euo pipefail
cd "$(dirname "$0")"
pids=()
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT

# decode-0
env \
  ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 \
  VLLM_HOST_IP=10.0.1.21 \
  HCCL_BUFFSIZE=1024 \
  GLOO_SOCKET_IFNAME=eth0 \
  HCCL_SOCKET_IFNAME=eth0 \
  HCCL_IF_IP=10.0.1.21 \
  vllm \
  serve \
  /models/DeepSeek-V3-W8A8 \
  --host 10.0.1.21 \
  --port 8100 \
  --served-model-name deepseek \
  --data-parallel-size 16 \
  --enable-prompt-tokens-details \
  --kv-transfer-config '{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_consumer","kv_port":"15600","engine_id":"2","kv_connector_extra_config":{"prefill":{"dp_size":2,"tp_size":8},"decode":{"dp_size":16,"tp_size":1}}}' \
  --quantization ascend \
  --enable-expert-parallel &
pids+=($!)

wait -n "${pids[@]}"
