"""Tensors that are not strided: nested, compressed and sparse ones."""
