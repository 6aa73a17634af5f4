"""Omni Proxy: a PD-disaggregated serving gateway for large language models."""

__version__ = "0.1.0"
