"""Several front processes around one scheduler process, on one machine.

The same events and effects that a single process passes by a call pass here over a Unix socket, in batches. Token bytes
never do: they go through the front that holds the client.
"""
