"""The load client: replays a workload against a server and measures from the client's side."""
