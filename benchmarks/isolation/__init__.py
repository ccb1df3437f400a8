"""Many comparisons in processes of their own, so that a crash or a hang costs one sample."""
