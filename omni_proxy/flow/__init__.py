"""What the core does about its events: the board it works on, and the answers to what goes wrong. Pure."""
