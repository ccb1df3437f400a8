"""What torch keeps for a process or a thread: settings, threads, the current stream."""
