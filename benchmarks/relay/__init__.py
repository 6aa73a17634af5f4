"""Compares HTTP gateways in one run: CPU per request and per token, added latency, memory.

Every gateway gets the same requests over the same mock workers, pinned to the same core, in turns;
what counts is the ratio between rows of one run, not the figures of one machine.
"""
