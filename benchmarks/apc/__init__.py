"""What prefix awareness costs, and how well it predicts: `python -m benchmarks.apc`."""
