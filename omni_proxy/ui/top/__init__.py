"""`omni-proxy top`: the gateway in a terminal."""
