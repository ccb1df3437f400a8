"""Sparse tensors, which hold indices and values: operators on those in place of their kernels."""
