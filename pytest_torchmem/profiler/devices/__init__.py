"""The devices a trace can be on: the host, the GPU catalogue, and how tensors say where they are."""
