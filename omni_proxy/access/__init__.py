"""Who may ask, and how much: API keys, tenants and their limits. Knows no HTTP and no sockets."""
