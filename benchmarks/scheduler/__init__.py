"""What the scheduler gains, mechanism by mechanism, and what it costs."""
