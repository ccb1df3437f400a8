"""The devices a trace can be on: the host, the GPUs, and how tensors say where they are."""
