"""The embedded engine: a small, real, disaggregated serving engine.

Only `omni-proxy worker` imports this package; the gateway never does, so that it installs without torch.
"""
