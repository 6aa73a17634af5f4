"""How well experts are placed: against the published algorithm and lower bounds, fitted and in the next window."""
