"""What real GPUs counted in the steps of many models, and how it is recorded."""
