"""Process groups and sharded tensors."""
