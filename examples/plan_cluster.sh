#!/usr/bin/env bash
# Plans a cluster before it is bought: one split simulated against other routers, then the fewest workers that meet limits.
#   examples/plan_cluster.sh
set -euo pipefail

# Sessions of four turns that share their beginnings, on 2P + 2D of a node with 8 H200 each, at 80 % of what P can compute.
workload=turns,requests=120,turns=4
omni-proxy simulate --synthetic "$workload" --prefill 2 --decode 2 --load 0.8 --slo ttft=2,tpot=0.05

# The split, and the fewest workers, with which 90 % of the requests have their first token within 2 s and then one each 50 ms.
omni-proxy plan --synthetic poisson,requests=200 --slo ttft=2,tpot=0.05 --workers 4 --rate 12
