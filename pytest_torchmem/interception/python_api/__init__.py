"""Python functions of torch that reach into memory, replaced for tensors that have none."""
