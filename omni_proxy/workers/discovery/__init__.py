"""Where workers are found besides the config: each module is one kind of source."""
