"""The simulator: a discrete-event world around the live core, and what is built from its engine model."""
