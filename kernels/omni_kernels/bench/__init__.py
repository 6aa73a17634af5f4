"""`python -m omni_kernels.bench`: every op, shape and backend against the machine's limits and its peers."""
