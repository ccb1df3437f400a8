"""Libraries that operators stand on, and what they take for themselves."""
