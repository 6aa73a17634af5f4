"""Workers on a Ray cluster: placed, watched, started again, and made known to the gateway."""
