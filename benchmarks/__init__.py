"""What the figures in the documentation come from; run from the root of the repository."""
