"""``torch.distributed`` in a trace: one process of a world, of which no other is there."""
