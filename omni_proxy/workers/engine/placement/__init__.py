"""Which rank holds which expert: placement, redundancy, shares, scores and moves. Needs numpy, never torch."""
