"""The private parts of torch that a trace stands on, looked up in one place."""
