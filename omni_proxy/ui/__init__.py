"""What operators look at: the web page, what it is fed with, and the same in a terminal. Reads, never decides."""
