#!/bin/sh
# Everything there is to check on an NVIDIA GPU, in under five minutes: results, then times. Needs torch with CUDA and
# triton in $PYTHON's environment (default python3); vLLM is compared with if it is there. Results go to $OUT (default .).
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-.}
export PYTHONPATH="kernels${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"
"$python" -c "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)" | tee -a "$out/gpu.txt"
"$python" kernels/bench/h200.py --json "$out/h200.json" | tee "$out/h200.txt"
