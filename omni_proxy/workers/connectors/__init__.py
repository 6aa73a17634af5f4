"""One file for each engine protocol: how a prompt's KV gets from P to D."""
