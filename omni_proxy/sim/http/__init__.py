"""A light HTTP/1.1 server and client on asyncio and httptools, for load and for workers that only pretend."""
