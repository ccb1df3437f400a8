"""The training step, shared by traces and real runs, and what it may change of the process."""
