"""What happened, for people and machines: metrics, access log, timelines. Reads, never decides."""
