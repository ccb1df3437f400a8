"""What is computed from graphs, and from traces of more than one step or size."""
