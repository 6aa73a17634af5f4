"""Inference workers: how the gateway reaches them (pool, client, connectors) and the embedded one (engine)."""
