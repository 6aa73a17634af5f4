"""The embedded engine beside transformers (and vLLM, if there is one) on the same checkpoints in one run."""
