"""What would help: changes of a step, each traced."""
