"""The life of a request: stage table, request state, timeline. Pure."""
