"""Several gateways before the same workers: what they tell each other, and how it travels."""
