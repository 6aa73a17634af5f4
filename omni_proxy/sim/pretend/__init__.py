"""A worker that only pretends: a real HTTP process that spends simulated time instead of computing."""
