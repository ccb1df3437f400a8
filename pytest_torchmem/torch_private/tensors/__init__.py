"""Tensors, storages and autograd's nodes, below what Python shows of them."""
