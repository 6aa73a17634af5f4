"""Benchmarks: each is a program of its own, run as ``python -m benchmarks.NAME``."""
