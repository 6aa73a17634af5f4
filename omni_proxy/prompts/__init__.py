"""From messages to tokens, as the model sees them; shared by the gateway and the embedded engine."""
