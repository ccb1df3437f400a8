"""Elements chosen by indices and masks, and elements put there."""
