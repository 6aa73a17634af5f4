"""The Triton backend: one source for NVIDIA and, through triton-ascend, Ascend."""
