"""Streams that nobody has to look at, moved from socket to socket."""
