"""What a trace or a measurement changes of a program and its process: noted once, and undone."""
