"""Compares gateways by what clients get of the same workers: latency, goodput, cache hits. See README.md."""
